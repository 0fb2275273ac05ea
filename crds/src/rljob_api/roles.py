"""The roles of components, and what each means to planner, validation and memory estimate: one row each, nothing about it anywhere else.

The runtime has a table of its own for what starts and drives a role. A new role is a member of :class:`Role` and a row of :data:`TRAITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from types import MappingProxyType


class Role(StrEnum):
    """What a component does."""

    TRAINER = "Trainer"
    """Holds the trained policy and its optimizer."""
    ROLLOUT = "Rollout"
    """Generates responses with an inference engine."""
    REFERENCE = "Reference"
    """Holds the frozen policy that the KL term compares with."""
    CRITIC = "Critic"
    """Estimates values for GAE."""
    REWARD = "Reward"
    """Scores responses in CPU processes."""
    ENVIRONMENT = "Environment"
    """Runs the environments of agentic jobs."""
    TEACHER = "Teacher"
    """Holds a frozen model with the policy's vocabulary, which the policy learns to match: algorithm.distillation."""
    JUDGE = "Judge"
    """Serves its own model with an inference engine, for rewards of type LLMJudge or RewardModel that name it."""


class RunsOn(Enum):
    """What the processes of a role need."""

    DEVICES = auto()
    """Accelerators, or what stands for them on a CPU node group; they hold a model."""
    CPU = auto()
    """CPU alone: ``workers``, or ranks that count nodes. Devices would stay idle."""
    CPU_OR_HARDWARE = auto()
    """CPU, or a robot or other hardware that ranks count."""


class AutoPhase(Enum):
    """The phase of a step that a role computes, which says how ``placement.mode: Auto`` sizes and places it."""

    TRAIN = auto()
    """As many devices as divide a mini-batch's samples; chosen first."""
    GENERATE = auto()
    """Engines on the devices that are left, or on the rest of the node that trains."""
    REFERENCE = auto()
    """Forward passes over whole sequences: as many devices as divide the responses of a step, beside those that train or elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleTraits:
    """A row."""

    runs_on: RunsOn
    min_components: int = 0
    """Components of the role that every job has."""
    max_components: int | None = None
    """Components of the role that a job may have; None for any number."""
    offload_fields: tuple[str, ...] = ()
    """State on devices, as the manifest's keys of ``components[].offload``."""
    auto_phase: AutoPhase | None = None
    """What ``placement.mode: Auto`` chooses devices for; None where it leaves the role to the spec. One role for each phase."""
    has_engine: bool = False
    """Whether its processes are inference engines: of several devices, each independent of the others, and free to share a device."""
    is_trained: bool = False
    """Whether it has gradients and an optimizer, and divides a mini-batch's samples over its processes."""
    takes_parallel_sizes: bool = False
    """Whether ``components[].tensorParallelSize``, ``contextParallelSize`` and ``expertParallelSize`` divide what it computes."""
    sized_by_training: bool = False
    """Whether the parallel sizes of ``spec.training`` are its own; :class:`~rljob_api.v1alpha1.rljob.RLJobSpec` returns them."""
    has_own_model: bool = False
    """Whether its model is another than ``spec.model``: it is not in the memory estimate."""
    publishes_weights: bool = False
    """Whether engines get their weights from it; its rank 0 gathers them."""

    @property
    def is_auto_placed(self) -> bool:
        """Whether ``placement.mode: Auto`` chooses devices for it."""
        return self.auto_phase is not None

    @property
    def holds_model(self) -> bool:
        """Whether a copy of a model, or a part of it, is on its devices."""
        return self.runs_on is RunsOn.DEVICES

    @property
    def divides_layers(self) -> bool:
        """Whether its processes can share each layer, whichever field says so; an engine's devices are within one process."""
        return self.takes_parallel_sizes or self.sized_by_training

    @property
    def receives_weights(self) -> bool:
        """Whether it generates with the weights that are published."""
        return self.has_engine and not self.has_own_model

    @property
    def takes_workers(self) -> bool:
        """Whether ``placement.workers`` can place it: as CPU processes."""
        return self.runs_on is not RunsOn.DEVICES


TRAITS: Mapping[Role, RoleTraits] = MappingProxyType(
    {
        Role.TRAINER: RoleTraits(
            runs_on=RunsOn.DEVICES,
            min_components=1,
            max_components=1,
            offload_fields=("optimizer", "weight", "grad"),
            auto_phase=AutoPhase.TRAIN,
            is_trained=True,
            sized_by_training=True,
            publishes_weights=True,
        ),
        Role.ROLLOUT: RoleTraits(
            runs_on=RunsOn.DEVICES,
            min_components=1,
            offload_fields=("weight", "kvCache"),
            auto_phase=AutoPhase.GENERATE,
            has_engine=True,
        ),
        Role.REFERENCE: RoleTraits(
            runs_on=RunsOn.DEVICES,
            max_components=1,
            offload_fields=("weight",),
            auto_phase=AutoPhase.REFERENCE,
            takes_parallel_sizes=True,
        ),
        Role.CRITIC: RoleTraits(
            runs_on=RunsOn.DEVICES,
            max_components=1,
            offload_fields=("optimizer", "weight", "grad"),
            is_trained=True,
            takes_parallel_sizes=True,
        ),
        Role.TEACHER: RoleTraits(runs_on=RunsOn.DEVICES, offload_fields=("weight",), takes_parallel_sizes=True, has_own_model=True),
        Role.REWARD: RoleTraits(runs_on=RunsOn.CPU),
        Role.ENVIRONMENT: RoleTraits(runs_on=RunsOn.CPU_OR_HARDWARE),
        Role.JUDGE: RoleTraits(runs_on=RunsOn.DEVICES, offload_fields=("weight",), has_engine=True, has_own_model=True),
    }
)
"""Every role, in the order in which ``mode: Auto`` names and places them."""
AUTO_ROLES: tuple[Role, ...] = tuple(role for role, traits in TRAITS.items() if traits.is_auto_placed)
"""Roles that ``mode: Auto`` chooses devices for."""
ROLE_OF_PHASE: Mapping[AutoPhase, Role] = MappingProxyType(
    {traits.auto_phase: role for role, traits in TRAITS.items() if traits.auto_phase is not None}
)
