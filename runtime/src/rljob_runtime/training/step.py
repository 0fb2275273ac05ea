"""Forward and backward over the micro-batches of one update; the optimizer is somebody else's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rljob_runtime.losses.aggregate import token_weights
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.objective import LossInputs, objective
from rljob_runtime.losses.spans import SpanIndex, span_index
from rljob_runtime.records import TrainBatch
from rljob_runtime.training.attention import Packing
from rljob_runtime.training.balance import Balance, balance_coefficient
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.context_parallel import RowPart, gather_numbers, part_of
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.microbatch import MicroBatch, filler, make_micro_batches
from rljob_runtime.training.parallel import Layout, layout_of
from rljob_runtime.training.router_bias import ExpertLoad
from rljob_runtime.training.sharing import LayerCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """A train batch as tensors (T,) with its micro-batches; as many of these on every rank."""

    micro_batches: list[MicroBatch]
    spans: SpanIndex
    tensors: Mapping[str, torch.Tensor]
    """Shape (T,) each: fields of :class:`~rljob_runtime.losses.objective.LossInputs` by name."""
    kl_coefficient: float
    temperature: float

    def inputs(self, micro: MicroBatch, device: torch.device) -> LossInputs:
        """What the loss of a micro-batch's wanted tokens (N,) needs."""
        sources = to_device(micro.sources, device)
        return LossInputs(spans=self.spans.of(micro.sources), **{name: tensor[sources] for name, tensor in self.tensors.items()})


def prepare_batches(
    batches: Sequence[TrainBatch], config: PolicyConfig, device: torch.device, costs: LayerCosts | None = None
) -> list[PreparedBatch]:
    """Cut batches into micro-batches and bring all ranks to the same number of them, with one collective.

    Args:
        batches: this rank's, one per update; those of context- and tensor-parallel ranks are equal.
        config: of the policy.
        device: where tensors go.
        costs: of the model, as :func:`~rljob_runtime.training.microbatch.make_micro_batches` takes them.

    Raises:
        ValueError: a batch does not fit its own shapes or denominators, or lacks what the loss asks for.
    """
    for batch in batches:
        _check_complete(batch, config.loss)
    prepared = []
    for batch, micro_batches in zip(batches, cut_batches(batches, config, device, costs), strict=True):
        spans = span_index(batch.response_mask, batch.lengths)
        tensors = _loss_tensors(batch, config.loss, spans)
        prepared.append(
            PreparedBatch(
                micro_batches=micro_batches,
                spans=spans,
                tensors={name: tensor.to(device) for name, tensor in tensors.items()},
                kl_coefficient=config.loss.kl_coefficient if batch.kl_coefficient is None else batch.kl_coefficient,
                temperature=batch.temperature,
            )
        )
    return prepared


def cut_batches(
    batches: Sequence[TrainBatch], config: PolicyConfig, device: torch.device, costs: LayerCosts | None
) -> list[list[MicroBatch]]:
    """Micro-batches of each batch, as many on every rank; arguments and errors as of :func:`prepare_batches`."""
    cut = [
        make_micro_batches(b.token_ids, b.lengths, b.response_mask, config.shared_budget, costs, b.sampling_mask, b.routes) for b in batches
    ]
    counts = torch.tensor([len(c) for c in cut], dtype=torch.int64, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    return [micro_batches + [filler()] * (count - len(micro_batches)) for micro_batches, count in zip(cut, counts.tolist(), strict=True)]


def accumulate_gradients(
    model: PreTrainedModel, batch: PreparedBatch, config: PolicyConfig, meter: StepMeter, *, fresh: bool, load: ExpertLoad | None = None
) -> None:
    """Add the gradient of one update's loss to ``.grad``; equal to that of the whole batch in one piece, over all ranks.

    FSDP averages gradients over its ranks, so each rank's loss is scaled by their number. Ranks exchange gradients with each micro-batch
    or once, with the last, as the configuration says. ``load`` counts which experts were chosen.
    """
    fsdp_size = layout_of(model).fsdp_size
    assert isinstance(model, FSDPModule)
    last = len(batch.micro_batches) - 1
    with_entropy = config.loss.entropy_coefficient > 0
    balance = _balance(model, batch.micro_batches, config)
    for index, micro in enumerate(batch.micro_batches):
        model.set_requires_gradient_sync(config.reduces_each_micro_batch or index == last)
        outputs, routing = _run(
            model,
            micro,
            batch.temperature,
            config.logprob_chunk_tokens,
            with_entropy=with_entropy,
            with_routing=balance is not None,
            load=load,
        )
        if micro.is_filler:
            (outputs.sum() * 0.0).backward()
            continue
        logprobs, entropy = (outputs[0], outputs[1]) if with_entropy else (outputs, None)
        inputs = batch.inputs(micro, logprobs.device)
        result = objective(logprobs, inputs, config.loss, kl_coefficient=batch.kl_coefficient, entropy=entropy)
        loss = result.loss if balance is None or routing is None else result.loss + balance.loss(routing)
        (loss * fsdp_size).backward()
        meter.add(result, inputs.behavior_logprobs, fresh=fresh)
    if balance is not None:
        meter.add_balance(balance.metrics())


def _balance(model: PreTrainedModel, micro_batches: Sequence[MicroBatch], config: PolicyConfig) -> Balance | None:
    """The load-balancing loss of an update; None where it is off."""
    coefficient = balance_coefficient(model, config.load_balancing)
    if coefficient == 0.0:
        return None

    layout = layout_of(model)

    def count(micro: MicroBatch) -> torch.Tensor:
        part = own_part(micro, layout)
        own = micro if part is None else part.micro
        return model.expert_choices(
            to_device(own.input_ids, model.device),
            to_device(own.positions, model.device),
            None if own.packed is None else Packing(own.packed, model.device, layout.cp_group),
            None if own.routes is None else to_device(own.routes, model.device),
        )

    top_k = model.config.get_text_config().num_experts_per_tok
    return Balance(micro_batches, count, coefficient=coefficient, top_k=top_k, group=layout.fsdp_group)


def own_part(micro: MicroBatch, layout: Layout) -> RowPart | None:
    """What this rank computes of a micro-batch with context parallelism; None: all of it, as of fillers, which have nothing to divide."""
    return None if layout.cp_size == 1 or micro.is_filler else part_of(micro, layout.cp_rank, layout.cp_size)


def run_micro_batch(model: PreTrainedModel, micro: MicroBatch, temperature: float, chunk_tokens: int) -> torch.Tensor:
    """Log-probs of the micro-batch's wanted tokens, shape (N,), float32."""
    return _run(model, micro, temperature, chunk_tokens)[0]


def _run(
    model: PreTrainedModel,
    micro: MicroBatch,
    temperature: float,
    chunk_tokens: int,
    *,
    with_entropy: bool = False,
    with_routing: bool = False,
    load: ExpertLoad | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs of the micro-batch's wanted tokens, shape (N,), float32, with entropies below: (2, N); and routing sums, or None.

    Context-parallel ranks have a part of the routing sums each.
    """
    device, layout = model.device, layout_of(model)
    part = own_part(micro, layout)
    own = micro if part is None else part.micro
    positions = to_device(own.positions, device)
    numbers, routing = model.token_logprobs(
        to_device(own.input_ids, device),
        positions,
        to_device(own.targets, device),
        temperature,
        chunk_tokens,
        None if own.packed is None else Packing(own.packed, device, layout.cp_group),
        with_entropy,
        None if own.possible_ids is None else to_device(own.possible_ids, device),
        None if own.possible_rows is None else to_device(own.possible_rows, device),
        with_routing,
        None if own.routes is None else to_device(own.routes, device),
    )
    if load is not None and not micro.is_filler:
        load.add(positions)
    return numbers if part is None or layout.cp_group is None else gather_numbers(numbers, part, layout.cp_group), routing


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """The array as a tensor; on the CPU without a copy where it is writable (read-only ones come out of shared memory)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device)


def _check_complete(batch: TrainBatch, config: LossConfig) -> None:
    """Refuse a batch without what the loss asks for."""
    policy = type(config.policy).__name__
    reference = f"kl_coefficient is {config.kl_coefficient}" if config.kl_coefficient > 0 else f"policy is {policy}"
    needs = (
        ("reference_logprobs", config.needs_reference, reference, "run the reference first"),
        (
            "teacher_logprobs",
            config.needs_teacher,
            f"distillation_coefficient is {config.distillation_coefficient}",
            "run the teacher first",
        ),
        ("proximal_logprobs", config.needs_proximal, f"proximal is {config.proximal}", "run the trainer over the batch first"),
        ("staleness", config.needs_staleness, f"proximal is {config.proximal}", "say how old each token is"),
        ("scores", config.needs_scores, f"policy is {policy}", "give the score of each sequence"),
    )
    for name, needed, setting, remedy in needs:
        if needed and getattr(batch, name) is None:
            raise ValueError(f"{setting} but the batch has no {name}; {remedy}")
    for name, shape in (
        ("reference_logprobs", batch.token_ids.shape),
        ("teacher_logprobs", batch.token_ids.shape),
        ("proximal_logprobs", batch.token_ids.shape),
        ("staleness", batch.token_ids.shape),
        ("scores", batch.lengths.shape),
        ("sample_weights", batch.lengths.shape),
    ):
        array = getattr(batch, name)
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} have shape {array.shape} but the batch asks for {shape}; one number per token, or per sequence")


def _loss_tensors(batch: TrainBatch, config: LossConfig, spans: SpanIndex) -> dict[str, torch.Tensor]:
    """What the loss uses of a batch, by its name in ``LossInputs``, shape (T,) each, on the CPU."""
    cpu = torch.device("cpu")
    weights = token_weights(
        to_device(batch.response_mask, cpu),
        to_device(batch.lengths, cpu),
        config.aggregation,
        global_tokens=batch.global_tokens,
        global_sequences=batch.global_sequences,
        norm_tokens=config.norm_tokens,
    )
    policy_weights = weights
    if batch.sample_weights is not None:
        policy_weights = weights * to_device(batch.sample_weights[spans.sequence_ids].astype(np.float32), cpu)
    arrays = {"behavior_logprobs": batch.behavior_logprobs, "advantages": batch.advantages}
    for name, needed in (
        ("reference_logprobs", config.takes_reference),
        ("teacher_logprobs", config.needs_teacher),
        ("proximal_logprobs", config.needs_proximal),
        ("staleness", config.needs_staleness),
    ):
        array = getattr(batch, name)
        if needed and array is not None:
            arrays[name] = array
    tensors = {name: to_device(array, cpu) for name, array in arrays.items()}
    if config.needs_scores and batch.scores is not None:
        tensors["scores"] = to_device(batch.scores[spans.sequence_ids], cpu)
    return tensors | {"weights": weights, "policy_weights": policy_weights}
