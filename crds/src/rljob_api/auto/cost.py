"""What a placement costs: seconds of the phases of one step.

| phase    | time                                                                                                    |
|----------|---------------------------------------------------------------------------------------------------------|
| generate | prefill 2 P FLOPs a token; then a step per token, bounded by reading the weights or by 2 P FLOPs        |
| reference| 2 P FLOPs a token                                                                                       |
| train    | 6 P FLOPs a token, 8 with recomputed activations, per epoch; plus the exchange of shards in each update |
| sync     | the weights once over the slowest link                                                                  |
| switch   | where roles share devices:        training states and engine weights out and in over PCIe              |

with P parameters. With ``spec.measured``, generation and training are the measured times, scaled by the number of devices.

Step, with X = reference + train, a = ``overlap.asyncGenerationRatio``::

    step = generate + X + sync + switch - hidden        hidden = min(min(a, 1) * generate, X), 0 on shared devices

so a = 0 is the sum, a >= 1 is max(generate, X) + sync, between them a share a of the batch is generated while the Trainer works.
The two ends are the synchronous and the one-step-off formula of ROLL-Flash (arXiv 2510.11345); fractions fill the trainer's time evenly.

Sources: peaks are the H100 SXM data sheet's (989 TFLOP/s bfloat16, 3.35 TB/s, NVLink 450 GB/s one way), utilization of training
38-43 % (Llama 3, arXiv 2407.21783, table 4). The other shares are rules of thumb. Only ratios between phases decide a choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rljob_api.dtypes import DTYPE_BYTES, engine_dtype, sync_dtype, train_state_bytes
from rljob_api.v1alpha1.components import Engine
from rljob_api.v1alpha1.operations import Residency
from rljob_api.v1alpha1.rljob import RLJobSpec

PEAK_FLOPS = 989e12
TRAIN_UTILIZATION = 0.4
DECODE_UTILIZATION = 0.15
"""Share of the peak FLOPs reached at large batches, attention and sampling included: an estimate."""
MEMORY_BYTES_PER_S = 3.35e12 * 0.6
"""What decoding reaches of the memory's bandwidth: an estimate."""
LINK_BYTES_PER_S = 450e9
"""Bandwidth of one device inside a node: NVLink."""
NETWORK_BYTES_PER_S = 50e9
"""Bandwidth of one device between nodes: one 400 Gbit/s card each."""
SYNC_LINK_BYTES_PER_S = 20e9
"""Weight sync inside a node: 30 B parameters in 3.0 s (slime's bucketed IPC on 8 H200, vllm-project/vime#175)."""
SYNC_NETWORK_BYTES_PER_S = 8.25e9
"""Weight sync between nodes: verl's NCCL checkpoint engine, 30 B parameters on 4 x 8 H100 (verl/checkpoint_engine/README)."""
PCIE_BYTES_PER_S = 50e9
CPU_SPEED = 1e-3
"""Speed of a virtual CPU device against an accelerator, both in memory bandwidth and in FLOPs, as an order of magnitude."""
UNKNOWN_PARAMETERS = 1_000_000_000
"""Stands for a model of unknown size: all phases are proportional to it, so their ratios stay."""


class Basis(StrEnum):
    """Where the times come from."""

    MEASURED = "measured"
    """spec.measured, scaled; what it lacks is estimated."""
    ESTIMATED = "estimated"
    """FLOPs and bytes of a model of known size."""
    RELATIVE = "relative"
    """The same without a model size: seconds per billion parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a candidate gives the phases."""

    trainer_devices: int
    engines: int
    reference_devices: int
    """0 without a Reference."""
    trainer_speed: float = 1.0
    """Speed of one device: 1 is an accelerator, with measured times the fastest kind the job has."""
    rollout_speed: float = 1.0
    reference_speed: float = 1.0
    trainer_spans_nodes: bool = False
    sync_spans_nodes: bool = False
    """Whether weights leave a node on their way to the engines."""
    shares_devices: bool = False
    """Whether Trainer and Rollout share the same devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of one step, by :class:`Basis`."""

    generate_s: float
    reference_s: float
    train_s: float
    sync_s: float
    switch_s: float
    hidden_s: float
    """Seconds of generation, beside the Trainer's work."""
    step_s: float
    """Six significant digits: closer costs count as equal."""


class CostModel:
    """Costs of one job's candidates, O(1) each. Costs never rise with more devices for a phase, other things equal."""

    def __init__(self, spec: RLJobSpec, engine: Engine, fastest: float = 1.0) -> None:
        """Read a job.

        Args:
            spec: of the job.
            engine: the Rollout's.
            fastest: speed of the fastest kind of device that the job has, against an accelerator: what was measured ran on it.
        """
        rollout, self._training, self._measured = spec.rollout, spec.training, spec.measured
        self.sequences = rollout.prompts_per_step * rollout.samples_per_prompt
        """Responses of one step; more engines than this have nothing to do."""
        self._engine = engine
        self._engine_devices = engine.num_devices
        self._response_tokens = rollout.max_response_tokens
        prompts = rollout.prompts_per_step if engine.prefix_caching else self.sequences
        self._prompt_tokens = prompts * rollout.max_prompt_tokens
        self._train_tokens = self.sequences * (rollout.max_prompt_tokens + rollout.max_response_tokens)
        self._flops_per_token = 8 if spec.training.activation_checkpointing else 6
        self._number_bytes = DTYPE_BYTES[spec.model.dtype]
        self._engine_bytes = DTYPE_BYTES[engine_dtype(spec, engine)]
        self._sync_bytes = DTYPE_BYTES[sync_dtype(spec)]
        self._switches = spec.offload.residency is Residency.SWITCHING
        self._ahead = min(spec.overlap.async_generation_ratio, 1.0)
        self._parameters, self.basis = self._size(spec.model.parameter_count, fastest)

    def _size(self, stated: int | None, fastest: float) -> tuple[float, Basis]:
        """Parameters, from the training time where they are not stated, and what the times are based on."""
        if self._measured is None:
            return (stated, Basis.ESTIMATED) if stated else (UNKNOWN_PARAMETERS, Basis.RELATIVE)
        if stated:
            return stated, Basis.MEASURED
        device_s = self._measured.train_seconds * self._measured.trainer_devices
        flops = self._flops_per_token * self._train_tokens * self._training.epochs
        per_parameter_s = flops / (PEAK_FLOPS * TRAIN_UTILIZATION * fastest)
        return device_s / per_parameter_s, Basis.MEASURED

    def cost(self, use: Use) -> Cost:
        """What one step takes."""
        generate, train, reference = self._generate(use), self._train(use), self._reference(use)
        sync, switch = self._sync(use), self._switch(use)
        work = reference + train
        hidden = 0.0 if use.shares_devices else min(self._ahead * generate, work)
        return Cost(
            generate_s=generate,
            reference_s=reference,
            train_s=train,
            sync_s=sync,
            switch_s=switch,
            hidden_s=hidden,
            step_s=float(f"{generate + work + sync + switch - hidden:.6g}"),
        )

    def _generate(self, use: Use) -> float:
        engines = min(use.engines, self.sequences)
        if self._measured is not None:
            devices = engines * self._engine_devices * use.rollout_speed
            return self._measured.generate_seconds * self._measured.rollout_devices / devices
        flops = PEAK_FLOPS * use.rollout_speed * self._engine_devices
        prefill = 2 * self._parameters * self._prompt_tokens / (engines * flops * TRAIN_UTILIZATION)
        of_engine = -(-self.sequences // engines)
        full, rest = divmod(of_engine, self._engine.max_running_requests)
        batches = [(full, self._engine.max_running_requests), (1, rest)]
        steps = sum(times * self._decode_step(running, use.rollout_speed) for times, running in batches if times and running)
        return prefill + self._response_tokens * steps

    def _decode_step(self, running: int, speed: float) -> float:
        """A token for each running request: all weights are read once, whatever their number."""
        devices = self._engine_devices * speed
        reading = self._parameters * self._engine_bytes / (devices * MEMORY_BYTES_PER_S)
        return max(reading, 2 * self._parameters * running / (devices * PEAK_FLOPS * DECODE_UTILIZATION))

    def _train(self, use: Use) -> float:
        devices = use.trainer_devices * use.trainer_speed
        if self._measured is not None:
            return self._measured.train_seconds * self._measured.trainer_devices / devices
        epochs, tensor = self._training.epochs, self._training.tensor_parallel_size
        flops = self._flops_per_token * self._parameters * self._train_tokens * epochs
        replicas = max(use.trainer_devices // tensor, 1)
        moved = 3 * self._parameters / tensor * self._number_bytes * (replicas - 1) / replicas
        exchange = epochs * self._training.mini_batches * moved / (NETWORK_BYTES_PER_S if use.trainer_spans_nodes else LINK_BYTES_PER_S)
        return flops / (devices * PEAK_FLOPS * TRAIN_UTILIZATION) + exchange

    def _reference(self, use: Use) -> float:
        """A forward pass; without a measurement of its own, the forward share of the measured training."""
        if not use.reference_devices:
            return 0.0
        devices = use.reference_devices * use.reference_speed
        if self._measured is not None:
            training = self._measured.train_seconds * self._measured.trainer_devices
            return training * 2 / self._flops_per_token / self._training.epochs / devices
        return 2 * self._parameters * self._train_tokens / (devices * PEAK_FLOPS * TRAIN_UTILIZATION)

    def _sync(self, use: Use) -> float:
        if self._measured is not None and self._measured.sync_seconds:
            return self._measured.sync_seconds
        return self._parameters * self._sync_bytes / (SYNC_NETWORK_BYTES_PER_S if use.sync_spans_nodes else SYNC_LINK_BYTES_PER_S)

    def _switch(self, use: Use) -> float:
        """The trainer's state out and in; an engine's weights come with the sync, and nothing moves where everything stays."""
        if not use.shares_devices or not self._switches:
            return 0.0
        return 2 * self._parameters * train_state_bytes(self._training) / use.trainer_devices / PCIE_BYTES_PER_S
