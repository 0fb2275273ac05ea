"""Forward and backward of a critic over the micro-batches of one update, and what a training step reports of it.

============================  ============================================================================================
critic/loss                   value loss, mean over the step's updates
critic/value_mean             mean value over trained tokens, at the beginning of the step
critic/return_mean            mean return over trained tokens
critic/explained_variance     1 - Var(R - V) / Var(R) over trained tokens, V at the beginning of the step: 1 knows every
                              return, 0 no better than a constant, below 0 worse; 0 where all returns are equal
critic/clip_fraction          share of trained tokens whose gradient the value clip removed
============================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rljob_api.vocabulary import Aggregation
from rljob_runtime.losses.aggregate import token_weights
from rljob_runtime.losses.value import ValueTerms, clipped_value_loss
from rljob_runtime.records import FloatArray, TrainBatch
from rljob_runtime.training.attention import Packing
from rljob_runtime.training.context_parallel import gather_numbers
from rljob_runtime.training.critic_config import CriticConfig
from rljob_runtime.training.microbatch import MicroBatch
from rljob_runtime.training.parallel import layout_of
from rljob_runtime.training.sharing import LayerCosts
from rljob_runtime.training.step import cut_batches, own_part, to_device

_SUMS = ("loss", "clipped", "tokens", "value", "return", "return_squared", "error", "error_squared")
ROUNDING = 1e-12
"""A variance below this share of the mean square is rounding of float64 sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedValues:
    """A train batch as tensors (T,) with its micro-batches; as many of these on every rank."""

    micro_batches: list[MicroBatch]
    weights: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor


class ValueMeter:
    """Sums up over tokens, micro-batches, updates and ranks; on the device, without a synchronization per micro-batch."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Start from nothing.

        Args:
            device: of what is counted.
            group: the ranks that have different batches; None: all.
        """
        self._group = group
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)

    def add_batch(self, batch: TrainBatch) -> None:
        """Count values and returns of one of this rank's batches."""
        values, returns = required(batch)
        kept = batch.response_mask != 0
        old, goal = values[kept].astype(np.float64), returns[kept].astype(np.float64)
        error = goal - old
        sums = [old.size, old.sum(), goal.sum(), np.square(goal).sum(), error.sum(), np.square(error).sum()]
        self._sums[2:] += self._sums.new_tensor(sums)

    def add(self, terms: ValueTerms, loss: torch.Tensor) -> None:
        """Count one micro-batch.

        Args:
            terms: per-token results, shape (N,).
            loss: this micro-batch's share of the aggregated loss, scalar.
        """
        self._sums[:2] += torch.stack([loss.detach().to(torch.float64), terms.clipped.sum().to(torch.float64)])

    def reduce(self, num_updates: int) -> dict[str, float]:
        """Combine over ranks; all ranks must call it, all get the same numbers."""
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(self._sums, group=self._group)
        total = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        tokens = total["tokens"]
        spread = _variance(total["return"], total["return_squared"], tokens)
        unexplained = _variance(total["error"], total["error_squared"], tokens)
        return {
            "critic/loss": total["loss"] / num_updates,
            "critic/value_mean": total["value"] / tokens,
            "critic/return_mean": total["return"] / tokens,
            "critic/explained_variance": 1.0 - unexplained / spread if spread else 0.0,
            "critic/clip_fraction": total["clipped"] / tokens,
        }


def prepare_values(batches: Sequence[TrainBatch], config: CriticConfig, device: torch.device, costs: LayerCosts) -> list[PreparedValues]:
    """Cut batches into micro-batches and bring all ranks to the same number of them, with one collective.

    Every trained token weighs ``1 / global_tokens``, whatever the policy's aggregation is: a value is right or wrong token by token.

    Args:
        batches: this rank's, one per update; those of context- and tensor-parallel ranks are equal.
        config: of the critic.
        device: where tensors go.
        costs: of the model, as :func:`~rljob_runtime.training.microbatch.make_micro_batches` takes them.

    Raises:
        ValueError: a batch does not fit its own shapes or denominators, or lacks values or returns.
    """
    targets = [required(batch) for batch in batches]
    prepared, cpu = [], torch.device("cpu")
    for batch, (values, returns), micro_batches in zip(batches, targets, cut_batches(batches, config, device, costs), strict=True):
        weights = token_weights(
            to_device(batch.response_mask, cpu),
            to_device(batch.lengths, cpu),
            Aggregation.TOKEN_MEAN,
            global_tokens=batch.global_tokens,
            global_sequences=batch.global_sequences,
        )
        prepared.append(
            PreparedValues(
                micro_batches=micro_batches,
                weights=weights.to(device),
                old_values=to_device(values, device),
                returns=to_device(returns, device),
            )
        )
    return prepared


def accumulate_value_gradients(model: PreTrainedModel, batch: PreparedValues, config: CriticConfig, meter: ValueMeter) -> None:
    """Add the gradient of one update's loss to ``.grad``; equal to that of the whole batch in one piece, over all ranks.

    FSDP averages gradients over its ranks, so each rank's loss is scaled by their number. Ranks exchange gradients with each micro-batch
    or once, with the last, as the configuration says.
    """
    fsdp_size = layout_of(model).fsdp_size
    assert isinstance(model, FSDPModule)
    last = len(batch.micro_batches) - 1
    for index, micro in enumerate(batch.micro_batches):
        model.set_requires_gradient_sync(config.reduces_each_micro_batch or index == last)
        values = run_value_micro_batch(model, micro)
        if micro.is_filler:
            (values.sum() * 0.0).backward()
            continue
        sources = to_device(micro.sources, values.device)
        terms = clipped_value_loss(values, batch.old_values[sources], batch.returns[sources], value_clip=config.value.value_clip)
        loss = torch.dot(terms.loss, batch.weights[sources])
        (loss * fsdp_size).backward()
        meter.add(terms, loss)


def run_value_micro_batch(model: PreTrainedModel, micro: MicroBatch) -> torch.Tensor:
    """Values before the micro-batch's wanted tokens, shape (N,), float32; equal on all ranks that divide its sequences."""
    device, layout = model.device, layout_of(model)
    part = own_part(micro, layout)
    own = micro if part is None else part.micro
    values: torch.Tensor = model.token_values(
        to_device(own.input_ids, device),
        to_device(own.positions, device),
        None if own.packed is None else Packing(own.packed, device, layout.cp_group),
    )
    return values if part is None or layout.cp_group is None else gather_numbers(values, part, layout.cp_group)


def required(batch: TrainBatch) -> tuple[FloatArray, FloatArray]:
    """Values and returns of a batch.

    Raises:
        ValueError: it lacks them, or they have another shape than its tokens.
    """
    if batch.values is None or batch.returns is None:
        missing = " and ".join(name for name, array in (("values", batch.values), ("returns", batch.returns)) if array is None)
        raise ValueError(f"the batch has no {missing}; run compute_values and the advantage estimator first")
    for name, array in (("values", batch.values), ("returns", batch.returns)):
        if array.shape != batch.token_ids.shape:
            raise ValueError(f"{name} have shape {array.shape} but token_ids {batch.token_ids.shape}; pass one number per token")
    return batch.values, batch.returns


def _variance(total: float, squares: float, count: float) -> float:
    """Population variance from sums; 0 where only rounding is left of it."""
    variance = squares / count - (total / count) ** 2
    return variance if variance > ROUNDING * squares / count else 0.0
