"""Forward and backward over the micro-batches of one update; the optimizer is somebody else's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rljob_runtime.losses.aggregate import token_weights
from rljob_runtime.losses.kl import kl_terms
from rljob_runtime.losses.policy import clipped_policy_loss
from rljob_runtime.records import TrainBatch
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.microbatch import MicroBatch, filler, make_micro_batches
from rljob_runtime.training.sharing import LayerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A train batch as tensors (T,) with its micro-batches; as many of these on every rank."""

    micro_batches: list[MicroBatch]
    weights: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    reference_logprobs: torch.Tensor | None
    temperature: float


def prepare_batches(
    batches: Sequence[TrainBatch], config: PolicyConfig, device: torch.device, costs: LayerCosts | None = None
) -> list[PreparedBatch]:
    """Cut batches into micro-batches and bring all ranks to the same number of them, with one collective.

    Args:
        batches: this rank's, one per update.
        config: of the policy.
        device: where tensors go.
        costs: of the model, as :func:`~rljob_runtime.training.microbatch.make_micro_batches` takes them.

    Raises:
        ValueError: a batch does not fit its own shapes or denominators, or lacks reference log-probs that the KL term needs.
    """
    cut = [make_micro_batches(b.token_ids, b.lengths, b.response_mask, config.token_budget, costs) for b in batches]
    counts = torch.tensor([len(c) for c in cut], dtype=torch.int64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    prepared, cpu = [], torch.device("cpu")
    for batch, micro_batches, count in zip(batches, cut, counts.tolist(), strict=True):
        if config.loss.kl_coefficient > 0 and batch.reference_logprobs is None:
            raise ValueError(
                f"kl_coefficient is {config.loss.kl_coefficient} but the batch has no reference_logprobs; run the reference first"
            )
        weights = token_weights(
            to_device(batch.response_mask, cpu),
            to_device(batch.lengths, cpu),
            config.loss.aggregation,
            global_tokens=batch.global_tokens,
            global_sequences=batch.global_sequences,
        )
        reference = batch.reference_logprobs
        prepared.append(
            PreparedBatch(
                micro_batches=micro_batches + [filler()] * (count - len(micro_batches)),
                weights=weights.to(device),
                behaviour_logprobs=to_device(batch.behaviour_logprobs, device),
                advantages=to_device(batch.advantages, device),
                reference_logprobs=None if reference is None else to_device(reference, device),
                temperature=batch.temperature,
            )
        )
    return prepared


def accumulate_gradients(model: PreTrainedModel, batch: PreparedBatch, config: PolicyConfig, meter: StepMeter, *, fresh: bool) -> None:
    """Add the gradient of one update's loss to ``.grad``; equal to that of the whole batch in one piece, over all ranks.

    FSDP averages gradients over ranks, so each rank's loss is scaled by their number. Ranks exchange gradients once, with the last
    micro-batch.
    """
    assert isinstance(model, FSDPModule)
    world_size = dist.get_world_size()
    last = len(batch.micro_batches) - 1
    for index, micro in enumerate(batch.micro_batches):
        model.set_requires_gradient_sync(index == last)
        logprobs = run_micro_batch(model, micro, batch.temperature, config.logprob_chunk_tokens)
        if micro.is_filler:
            (logprobs.sum() * 0.0).backward()
            continue
        sources = to_device(micro.sources, logprobs.device)
        behaviour, weights = batch.behaviour_logprobs[sources], batch.weights[sources]
        terms = clipped_policy_loss(
            logprobs,
            behaviour,
            batch.advantages[sources],
            clip_low=config.loss.clip_low,
            clip_high=config.loss.clip_high,
            dual_clip=config.loss.dual_clip,
        )
        policy_loss = torch.dot(terms.loss, weights)
        kl_loss = torch.zeros_like(policy_loss)
        if batch.reference_logprobs is not None and config.loss.kl_coefficient > 0:
            kl_loss = torch.dot(kl_terms(logprobs, batch.reference_logprobs[sources], config.loss.kl_estimator), weights)
        ((policy_loss + config.loss.kl_coefficient * kl_loss) * world_size).backward()
        meter.add(terms, behaviour, policy_loss, kl_loss, fresh=fresh)


def run_micro_batch(model: PreTrainedModel, micro: MicroBatch, temperature: float, chunk_tokens: int) -> torch.Tensor:
    """Log-probs of the micro-batch's wanted tokens, shape (N,), float32."""
    device = model.device
    logprobs: torch.Tensor = model.token_logprobs(
        to_device(micro.input_ids, device),
        to_device(micro.positions, device),
        to_device(micro.targets, device),
        temperature,
        chunk_tokens,
        None if micro.position_ids is None else to_device(micro.position_ids, device),
        None if micro.until is None else to_device(micro.until, device),
    )
    return logprobs


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor; on the CPU without a copy where it is writable (read-only ones come out of shared memory)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)
