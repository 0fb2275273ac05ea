"""Device clients: what gets a lease as a whole, such as a trainer with all its ranks, or one engine.

Engines are one client each, so that some can go on while a trainer uses the devices of others (partial-device mode).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljob_api.memory import Kind, Phase
from rljob_api.memory.model import ProcessNeeds
from rljob_api.planning.plan import PlannedProcess
from rljob_api.v1alpha1.components import ComponentOffload, OffloadPolicy
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.states import StateKind

POLICY_FIELDS: Mapping[StateKind, str] = {
    StateKind.PARAMS: "weight",
    StateKind.GRADS: "grad",
    StateKind.OPTIMIZER: "optimizer",
    StateKind.KV_CACHE: "kvCache",
}
"""Field of ``components[].offload``; other state is always Auto."""
_KIND_OF: Mapping[Kind, StateKind] = {
    Kind.WEIGHT: StateKind.PARAMS,
    Kind.OPTIMIZER: StateKind.OPTIMIZER,
    Kind.KV_CACHE: StateKind.KV_CACHE,
}


class StateMover(Protocol):
    """A worker as the arbiter uses it: any running worker whose class has ``offload(kinds)`` and ``load(kinds)``."""

    @property
    def name(self) -> str:
        """The worker's unique name."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``offload`` or ``load`` with the kinds; answers a :class:`~.states.SwitchReport`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProcess:
    """One worker and what it needs on each of its devices."""

    worker: StateMover
    devices: tuple[Device, ...]
    size_bytes: Mapping[StateKind, int]
    """By kind; kinds that are not listed do not exist. Estimates, which the worker's reports replace."""
    fixed_bytes: int = 0
    """What it has there as long as it lives."""
    working_bytes: int = 0
    """What comes on top while it computes: activations, logits, gathered weights, gradients."""
    partial_working_bytes: int | None = None
    """What comes on top while it computes with some of its kinds only, as in a weight sync; None: the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceClient:
    """A component, or one engine of it."""

    name: str
    """Unique."""
    processes: tuple[ClientProcess, ...]
    policies: Mapping[StateKind, OffloadPolicy] = field(default_factory=dict)
    """When a kind leaves; Auto where a kind is not listed."""
    rederivable: frozenset[StateKind] = frozenset()
    """Kinds beside KV cache and gradients that need no copy when they leave, such as an engine's weights that a sync writes anyway."""
    leaves_alone: bool = False
    """Whether nothing may come to its devices while it gives something up."""

    @property
    def kinds(self) -> frozenset[StateKind]:
        """All that some process of it has."""
        return frozenset(kind for process in self.processes for kind in process.size_bytes)

    @property
    def devices(self) -> frozenset[Device]:
        """All devices of its processes."""
        return frozenset(device for process in self.processes for device in process.devices)

    def policy(self, kind: StateKind) -> OffloadPolicy:
        """When the kind leaves."""
        return self.policies.get(kind, OffloadPolicy.AUTO)


def local_devices(process: PlannedProcess) -> tuple[Device, ...]:
    """Devices of a planned process."""
    return tuple(Device(process.node_rank, index) for index in process.local_devices)


def policies(offload: ComponentOffload, residency: Residency, *, has_cache: bool = False) -> dict[StateKind, OffloadPolicy]:
    """When each kind of a component's state leaves; with ``residency: Resident`` nothing ever does.

    The KV cache of an engine whose weights always leave does too: it is useless without them, and engines refuse to keep it.
    """
    if residency is Residency.RESIDENT:
        return dict.fromkeys(StateKind, OffloadPolicy.NEVER)
    wanted = {
        StateKind.PARAMS: offload.weight,
        StateKind.GRADS: offload.grad,
        StateKind.OPTIMIZER: offload.optimizer,
        StateKind.KV_CACHE: offload.kv_cache,
    }
    if has_cache and offload.weight is OffloadPolicy.ALWAYS:
        wanted[StateKind.KV_CACHE] = OffloadPolicy.ALWAYS
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What one process needs on each of its devices."""

    size_bytes: Mapping[StateKind, int]
    fixed_bytes: int = 0
    working_bytes: int = 0
    partial_working_bytes: int = 0


def estimated(needs: ProcessNeeds, kinds: Iterable[StateKind]) -> Sizes:
    """Sizes of a process from the memory estimate, so that the arbiter never asks for more than the estimate added up.

    Gradients, and an optimizer that is not among ``kinds`` because it comes for its step alone, count as work. The same goes for what an
    engine reserves for its forward passes, and for the cache of a judge, which leaves with the rest. A weight sync is the
    work with weights alone.

    Args:
        needs: of the process.
        kinds: that leave and come on the arbiter's word.
    """
    held: dict[Kind, int] = {}
    for need in needs.states:
        held[need.kind] = held.get(need.kind, 0) + need.num_bytes
    sizes = {kind: 0 for kind in kinds} | {_KIND_OF[kind]: size for kind, size in held.items() if _KIND_OF.get(kind) in set(kinds)}
    stepping = 0 if StateKind.OPTIMIZER in sizes else held.get(Kind.OPTIMIZER, 0)
    reserved = held.get(Kind.WORKSPACE, 0) + (0 if StateKind.KV_CACHE in sizes else held.get(Kind.KV_CACHE, 0))
    working = {phase: reserved + sum(need.num_bytes for need in needs.working.get(phase, ())) for phase in needs.active}
    for phase in (Phase.OPTIMIZER_STEP, Phase.CRITIC_STEP):
        if phase in working:
            working[phase] += stepping
    partial = working.pop(Phase.WEIGHT_SYNC, 0)
    return Sizes(
        size_bytes=sizes,
        fixed_bytes=held.get(Kind.PROCESS, 0),
        working_bytes=max(working.values(), default=0),
        partial_working_bytes=partial,
    )
