"""Seconds of everything in a step, from arithmetic and bandwidths: the world of a job that has not run.

With A parameters that a token is multiplied with, P of the whole model, F = peak FLOP/s times what is reached of it:

    decoding step   n responses, D devices: the larger of reading (weights, of a mixture the experts in use, and n caches) and
                    2 A n / (D F); on top 3 ms, and 15 us for each exchange between the devices, two a layer
    prefill         2 A / (D F) a token
    training        (6 A + 6 L H d s) / (N F) a token, a third more with activations computed again; or the gathering of weights
                    where that takes longer; on top what moves between devices that share sequences, or experts
    an update       gradients are exchanged once, 4 P bytes a device
    reference       2 A / (N F) a token
    weight sync     all weights once, at the rates that ``rljob_api.auto.cost`` takes; or as often as they leave a sender's node, at the
                    rate of its link, where that takes longer
    switch          of shared devices: weights and moments over the host's link

Rates that are reached are those of ``rljob_api.auto.cost``, with its sources. Not in it: rewards, checkpoints, validation, failures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from rljob_api.auto import cost as rates
from rljob_api.dtypes import DTYPE_BYTES, engine_dtype, sync_dtype, train_state_bytes
from rljob_api.memory import ModelShape
from rljob_api.rules.rollout import default_max_staleness
from rljob_api.v1alpha1.components import Engine, Role
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_runtime.errors import SetupError
from rljob_runtime.simulation.devices import DeviceType
from rljob_runtime.simulation.layout import Layout
from rljob_runtime.simulation.lengths import Lengths, log_normal
from rljob_runtime.simulation.world import DecodeStep, World

MEMORY_SHARE = 0.6
"""Of the memory's bandwidth that decoding reaches: as ``rates.MEMORY_BYTES_PER_S``."""
STEP_S = 3e-3
"""Of an engine's step whatever is in it: scheduling, sampling, launches. A rule of thumb."""
EXCHANGE_S = 15e-6
"""Of a small exchange between the devices of an engine."""
LONGEST_UNITS = 1024
"""A longest response is simulated in so many pieces at most: time and memory of a simulation do not grow with its length."""
WARMUP_STEPS = 3
STEPS = 4
"""Measured ones: an even number, as one batch ahead short and long steps alternate."""
SEED = 0
GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What is simulated, and how its units translate."""

    world: World
    lengths: Lengths
    unit_tokens: int
    """Tokens of one unit of the world's lengths."""
    layout: Layout
    basis: str
    """Where the seconds come from, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What of a model is computed and read."""

    active: float
    """Parameters that a token is multiplied with, the head included."""
    parameters: int
    experts: float
    """Parameters of all experts but shared ones."""
    routed_share: float
    """Of the experts, by one token."""
    routed_numbers: float
    """Hidden states of one token that its experts take, in all layers."""
    cache_numbers: float
    """Of one token, on all devices of an engine together."""
    attention: float
    """Layers times width of all query heads; 0 where sizes are not known."""
    num_layers: int


def weights_of(shape: ModelShape, layout: Layout) -> Weights:
    """From the sizes of a model; of a dense one of which only the parameters are known, without attention and caches."""
    decoder = shape.decoder
    if decoder is None:
        return Weights(
            active=shape.parameters,
            parameters=shape.parameters,
            experts=0,
            routed_share=0,
            routed_numbers=0,
            cache_numbers=0,
            attention=0,
            num_layers=0,
        )
    layers, hidden = decoder.num_layers, decoder.hidden_size
    in_layers = shape.parameters - decoder.root_parameters
    experts, active = 0.0, float(in_layers)
    if decoder.num_experts:
        outside = decoder.attention_parameters + hidden * decoder.num_experts
        active = float(layers * (outside + 3 * hidden * decoder.intermediate_size))
        experts = float(decoder.expert_parameters)
    return Weights(
        active=active + decoder.embedding_parameters,
        parameters=shape.parameters,
        experts=experts,
        routed_share=decoder.experts_per_token / decoder.num_experts if experts else 0.0,
        routed_numbers=float(layers * decoder.experts_per_token * hidden),
        cache_numbers=float(layers * layout.engine_tensor_devices * decoder.cached_numbers(layout.engine_tensor_devices)),
        attention=float(layers * decoder.query_size),
        num_layers=layers,
    )


def simulated(spec: RLJobSpec, layout: Layout, shape: ModelShape | None, device: DeviceType, mean_response: int | None) -> Simulated:
    """The world of a job on a kind of device.

    Args:
        spec: of the job.
        layout: of its plan.
        shape: of its model.
        device: what all of its devices are.
        mean_response: tokens; None: half of the longest.

    Raises:
        SetupError: the size of the model is not known, or the mean is longer than the longest.
    """
    if shape is None:
        raise SetupError("--simulate: the size of the model is not known; set spec.model.parameterCount, or point model.path at its folder")
    lengths, unit = response_lengths(spec, mean_response)
    mean = float(lengths.table.mean()) * unit
    weights = weights_of(shape, layout)
    return Simulated(
        world=_world(spec, layout, weights, device, mean, unit),
        lengths=lengths,
        unit_tokens=unit,
        layout=layout,
        basis=f"arithmetic and bandwidths of {device.name}; responses log-normal, mean {mean:,.0f} tokens, longest "
        f"{spec.rollout.max_response_tokens:,}",
    )


def response_lengths(spec: RLJobSpec, mean_response: int | None) -> tuple[Lengths, int]:
    """Lengths in units, and the tokens of a unit.

    Raises:
        SetupError: the mean is longer than the longest.
    """
    rollout = spec.rollout
    longest = rollout.max_response_tokens
    mean = longest / 2 if mean_response is None else mean_response
    if mean > longest:
        raise SetupError(f"--mean-response {mean:g}: is above rollout.maxResponseTokens, {longest}; give a smaller one")
    unit = ceil(longest / LONGEST_UNITS)
    prompts = (WARMUP_STEPS + STEPS + default_max_staleness(spec.overlap.async_generation_ratio) + 2) * rollout.prompts_per_step
    made = log_normal(mean=mean / unit, longest=longest // unit, prompts=prompts, samples=rollout.samples_per_prompt, seed=SEED)
    return made, unit


def _world(spec: RLJobSpec, layout: Layout, weights: Weights, device: DeviceType, mean: float, unit: int) -> World:
    rollout, overlap = spec.rollout, spec.overlap
    engine = next((c.engine for c in spec.components if c.role is Role.ROLLOUT and c.engine is not None), None) or Engine()
    prefill_s = 2 * weights.active / (layout.engine_devices * device.flops * rates.TRAIN_UTILIZATION)
    fixed_s, token_s = _training(spec, layout, weights, device, mean)
    switch_s = 2 * weights.parameters * train_state_bytes(spec.training) / layout.trainer_devices / device.host_bytes_per_s
    number_bytes = DTYPE_BYTES[engine_dtype(spec, engine)]
    context = rollout.max_prompt_tokens + mean / 2
    return World(
        groups_per_step=rollout.prompts_per_step,
        samples_per_group=rollout.samples_per_prompt,
        num_engines=layout.engines,
        slots=_slots(layout, weights, device, context, number_bytes, engine.memory_fraction),
        max_tokens=rollout.max_response_tokens // unit,
        decode=_decode(layout, weights, device, context, number_bytes, unit),
        train_s=fixed_s,
        train_token_s=token_s * unit,
        sync_s=_sync(spec, layout, weights, device),
        recompute_token_s=prefill_s * unit,
        reward_s=0.0,
        ratio=overlap.async_generation_ratio,
        mode="Drain" if overlap.update_mode is None else overlap.update_mode.value,
        steps=WARMUP_STEPS + STEPS,
        warmup_steps=WARMUP_STEPS,
        max_staleness=overlap.max_staleness,
        prompt_tokens=rollout.max_prompt_tokens / unit,
        prefill_token_s=prefill_s * unit,
        caches_prefixes=layout.caches_prefixes,
        shares_devices=layout.shares_devices,
        switch_s=switch_s / 2 if layout.shares_devices and spec.offload.residency.value == "Switching" else 0.0,
    )


def _slots(layout: Layout, weights: Weights, device: DeviceType, context: float, number_bytes: int, fraction: float) -> int:
    """Responses whose caches fit beside the weights, at most as many as the engine is to run.

    Raises:
        SetupError: the weights do not fit.
    """
    of_device = device.memory_bytes * fraction - weights.parameters * number_bytes / layout.engine_devices
    if of_device <= 0:
        there, taken = device.memory_bytes * fraction, weights.parameters * number_bytes / layout.engine_devices
        raise SetupError(
            f"an engine's weights take {taken / 1e9:.0f} GB of each of its {layout.engine_devices} devices, and memoryFraction "
            f"{fraction:g} of {device.name} is {there / 1e9:.0f} GB; give engines more devices"
        )
    if not weights.cache_numbers:
        return layout.slots
    fitting = int(of_device * layout.engine_devices / (weights.cache_numbers * number_bytes * context))
    if fitting < 1:
        raise SetupError(f"no response fits beside an engine's weights on {layout.engine_devices} {device.name}; give engines more devices")
    return min(layout.slots, fitting)


def _decode(layout: Layout, weights: Weights, device: DeviceType, context: float, number_bytes: int, unit: int) -> DecodeStep:
    """Of one unit of tokens."""
    memory = layout.engine_devices * device.memory_bytes_per_s * MEMORY_SHARE
    flops = layout.engine_devices * device.flops * rates.DECODE_UTILIZATION
    exchanges_s = 2 * weights.num_layers * EXCHANGE_S if layout.engine_devices > 1 else 0.0
    whole = (weights.parameters - weights.experts) * number_bytes / memory
    return DecodeStep(
        fixed_s=unit * (whole + STEP_S + exchanges_s),
        cache_s=unit * weights.cache_numbers * number_bytes * context / memory,
        compute_s=unit * 2 * weights.active / flops,
        experts_s=unit * weights.experts * number_bytes / memory,
        routed_share=weights.routed_share,
    )


def _training(spec: RLJobSpec, layout: Layout, weights: Weights, device: DeviceType, mean: float) -> tuple[float, float]:
    """(seconds of a step whatever is in it, seconds of a response token), prompts counted with their responses."""
    rollout, training = spec.rollout, spec.training
    again = 4 / 3 if training.activation_checkpointing else 1.0
    devices, length = layout.trainer_devices, rollout.max_prompt_tokens + mean
    reached = devices * device.flops * rates.TRAIN_UTILIZATION
    compute_s = again * training.epochs * (6 * weights.active + 6 * weights.attention * length / 2) / reached
    replicas = max(devices // layout.tensor_parallel_size, 1)
    link = device.network_bytes_per_s if layout.trainer_spans_nodes else device.link_bytes_per_s
    number_bytes = DTYPE_BYTES[spec.model.dtype]
    gathers = 3 if training.activation_checkpointing else 2
    exchanged = _exchanged_parameters(spec, weights, replicas, layout.tensor_parallel_size)
    gathered = gathers * exchanged * number_bytes
    gather_s = training.epochs * gathered / link / (training.micro_batch_tokens * replicas)
    per_token_s = max(compute_s, gather_s) + _shared_sequences(spec, layout, weights, device)
    per_token_s += _shared_experts(spec, layout, weights, device)
    if layout.reference_devices:
        per_token_s += (2 * weights.active + 2 * weights.attention * length / 2) / (
            layout.reference_devices * device.flops * rates.TRAIN_UTILIZATION
        )
    share = length / mean  # a response brings its prompt
    updates = training.epochs * training.mini_batches
    exchange_s = updates * GRADIENT_BYTES * exchanged / link
    return exchange_s, per_token_s * share


def _exchanged_parameters(spec: RLJobSpec, weights: Weights, replicas: int, tensor: int) -> float:
    """Of other processes, that a process gathers for a pass: not the experts that the others of its group compute with.

    Tensor parallelism divides all but the experts, which all processes shard.

    Args:
        spec: of the job.
        weights: of the model.
        replicas: tensor-parallel groups.
        tensor: processes of each.
    """
    group = spec.training.expert_parallel_size
    others = (weights.parameters - weights.experts) * (replicas - 1) / replicas / tensor
    return others + weights.experts / group * (1 - group / (replicas * tensor))


def _shared_experts(spec: RLJobSpec, layout: Layout, weights: Weights, device: DeviceType) -> float:
    """Seconds of a token for expert parallelism: hidden states go to experts and back, and their gradients.

    A group are neighbors, so that this stays on a node.
    """
    training, group = spec.training, spec.training.expert_parallel_size
    passes = 3 if training.activation_checkpointing else 2
    moved = 2 * weights.routed_numbers * DTYPE_BYTES[spec.model.dtype] * (group - 1) / group
    return training.epochs * passes * moved / device.link_bytes_per_s / layout.trainer_devices


def _shared_sequences(spec: RLJobSpec, layout: Layout, weights: Weights, device: DeviceType) -> float:
    """Seconds of a token for context parallelism: queries, keys, values and outputs of all layers change places, gradients change back.

    Processes that share a sequence are neighbors, so that this stays on a node.
    """
    training, sharing = spec.training, spec.training.context_parallel_size
    passes = 3 if training.activation_checkpointing else 2
    moved = (2 * weights.attention + weights.cache_numbers) * DTYPE_BYTES[spec.model.dtype] * (sharing - 1) / sharing
    return training.epochs * passes * moved / device.link_bytes_per_s / layout.trainer_devices


def _sync(spec: RLJobSpec, layout: Layout, weights: Weights, device: DeviceType) -> float:
    rate = rates.SYNC_NETWORK_BYTES_PER_S if layout.sync_spans_nodes else rates.SYNC_LINK_BYTES_PER_S
    size_bytes = weights.parameters * DTYPE_BYTES[sync_dtype(spec)]
    return max(size_bytes / rate, layout.sync_copies * size_bytes / device.network_bytes_per_s)
