"""Components: what runs where. The placement spec."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.roles import Role as Role
from rljob_api.v1alpha1.base import ComponentName, Count, FreeForm, Label, PathText, SpecModel
from rljob_api.v1alpha1.data import DType
from rljob_api.v1alpha1.pods import EnvVar


class EngineType(StrEnum):
    """Inference engines."""

    VLLM = "VLLM"
    """vLLM."""
    SGLANG = "SGLang"
    """SGLang; its server runs in a separate interpreter. Not for Judge components."""


class OffloadPolicy(StrEnum):
    """When a kind of state leaves the device while its component is idle."""

    AUTO = "Auto"
    """When another component needs the space."""
    ALWAYS = "Always"
    """Whenever the component is idle."""
    NEVER = "Never"
    """It stays on the device."""


class PlacementChoice(StrEnum):
    """How the placement of a component is chosen."""

    EXPLICIT = "Explicit"
    """By the spec: ranks, deviceMapping, or workers."""
    AUTO = "Auto"
    """By the planner, from a cost model."""


class Placement(SpecModel):
    """Where a component's processes run: give ranks, or deviceMapping, or workers, or let the planner choose.

    ranks is RLinf's grammar, deviceMapping ROLL's; both are compiled by the same planner.
    """

    mode: PlacementChoice = PlacementChoice.EXPLICIT
    """Auto lets the planner choose devices for a Trainer, Rollout or Reference; `rljob plan --explain` shows what it chose and why."""
    node_groups: tuple[Label, ...] = Field(default=(), max_length=16)
    """Groups to place on; ranks then count through these groups in this order. Empty, or the reserved name cluster, means all groups.
    The reserved name node counts nodes, whatever hardware they have."""
    ranks: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Ranks of devices (or robots, or nodes, whatever the groups offer) such as "0-3" or "all": one process each, unless process
    ranks follow a colon: "0-3:0-7" puts two processes on each, "0-7:0-3" gives two to each process."""
    device_mapping: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Device ranks as an expression such as "list(range(0,4))" or "[0, 2]"; parsed, never evaluated."""
    devices_per_worker: Annotated[int, Field(ge=1, le=1024)] | None = None
    """With deviceMapping: consecutive devices of one process. A Trainer always has one, a Rollout its engine's size."""
    workers: Count | None = None
    """Number of CPU-only processes, spread round-robin over the nodes."""


class Engine(SpecModel):
    """The inference engine of a Rollout or Judge component."""

    type: EngineType = EngineType.VLLM
    """Type of the engine."""
    dtype: DType | None = None
    """Floating-point type of its weights, cache and computation; model.dtype when not set."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer."""
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Pipeline stages, each with a part of the layers. Needs engine.type VLLM; not with weightSync.adapters: Served or
    training.routerReplay: Engine."""
    max_running_requests: Annotated[int, Field(ge=1, le=65536)] = 256
    """Maximum number of sequences that one engine decodes at the same time."""
    kv_cache_bytes: Annotated[int, Field(ge=1_048_576)] | None = None
    """Bytes of KV cache; when not set, 128 MiB on CPU devices and memoryFraction on accelerators."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Share of an accelerator's memory the engine may take."""
    prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes."""
    enforce_eager: bool = False
    """Disable CUDA graphs and compilation."""
    extra_args: FreeForm = Field(default={})
    """Additional arguments of the engine, by its own names, such as block_size; those that RLJob sets itself are refused."""

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class ComponentOffload(SpecModel):
    """What leaves the device while this component is idle (time-division)."""

    optimizer: OffloadPolicy = OffloadPolicy.AUTO
    """Optimizer states."""
    weight: OffloadPolicy = OffloadPolicy.AUTO
    """Parameters."""
    grad: OffloadPolicy = OffloadPolicy.AUTO
    """Gradients."""
    kv_cache: OffloadPolicy = OffloadPolicy.AUTO
    """The engine's KV cache."""


class ServedModel(SpecModel):
    """The model of a component that has a different model than the policy."""

    path: PathText
    """A local Hugging Face folder on the component's nodes, or a Hub id owner/name. A Teacher's model is downloaded once per node; each
    engine of a Judge downloads it itself."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a model on the Hub; its default branch when not set."""
    trust_remote_code: bool = False
    """Run Python code that is part of the model's files."""
    parameter_count: Annotated[int, Field(ge=1, le=100_000_000_000_000)] | None = None
    """Number of parameters, for the memory estimate if the model's config.json is not available, as in the operator."""


class Teaches(SpecModel):
    """Which prompts a Teacher scores, and its weight."""

    sources: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=256)
    """Tags of the prompts: names of data sources, values of jsonl.tagField, or names of environments; empty means all that no other Teacher
    has."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor of algorithm.distillation.coefficient for these prompts, with placement Reward."""


class Component(SpecModel):
    """A group of identical worker processes with one role."""

    name: ComponentName
    """Unique name; workers are called <name>-<rank> and log under that name."""
    role: Role
    """Role of its processes."""
    placement: Placement
    """Where it runs."""
    engine: Engine | None = None
    """Engine of a Rollout or Judge component; vLLM with defaults if not set."""
    model: ServedModel | None = None
    """Model of a Teacher or Judge component; the other roles use spec.model."""
    teaches: Teaches | None = None
    """Prompts of a Teacher, if a job has several: each prompt has one teacher."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices that share each layer of a Reference, Critic, or Teacher; 1 by default. A Trainer has training.tensorParallelSize instead, a
    Rollout or Judge engine.tensorParallelSize."""
    context_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices, or groups of tensorParallelSize devices, that share each sequence of a Reference, Critic, or Teacher; 1 by default. A
    Trainer has training.contextParallelSize instead."""
    expert_parallel_size: Annotated[int, Field(ge=1, le=128)] | None = None
    """Mixture of experts: devices of a Reference, Critic, or Teacher that each hold a part of every layer's experts; 1 by default. A
    Trainer has training.expertParallelSize instead."""
    threads_per_worker: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPU threads of one worker; by default the node's cores are divided among the workers that compute at the same time."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128)
    """Environment of this component's workers."""
    python_interpreter: PathText | None = None
    """Python interpreter of this component's workers; overrides that of their node group."""
    offload: ComponentOffload = ComponentOffload()
    """Time-division of this component."""
