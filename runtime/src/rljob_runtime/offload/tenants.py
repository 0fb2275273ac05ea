"""Who shares devices: a tenant is what gets a lease as a whole, such as a trainer with all its ranks, or one engine.

Engines are one tenant each, so that some can go on while a trainer uses the devices of others (partial-device mode).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rljob_api.memory import Kind, Need
from rljob_api.memory.model import ProcessNeeds
from rljob_api.plan import PlannedProcess
from rljob_api.v1alpha1.components import ComponentOffload, OffloadPolicy
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.cluster.protocol import Worker
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
    Kind.GRAD: StateKind.GRADS,
    Kind.OPTIMIZER: StateKind.OPTIMIZER,
    Kind.KV_CACHE: StateKind.KV_CACHE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantProcess:
    """One worker and what it needs on each of its devices."""

    worker: Worker
    devices: tuple[Device, ...]
    size_bytes: Mapping[StateKind, int]
    """By kind; kinds that are not listed do not exist. Estimates, which the worker's reports replace."""
    fixed_bytes: int = 0
    """What it has there as long as it lives."""
    working_bytes: int = 0
    """What comes on top while it computes: activations, logits, gathered weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A component, or one engine of it."""

    name: str
    """Unique."""
    processes: tuple[TenantProcess, ...]
    policies: Mapping[StateKind, OffloadPolicy] = field(default_factory=dict)
    """When a kind leaves; Auto where nothing is said."""
    rederivable: frozenset[StateKind] = frozenset()
    """Kinds beside KV cache and gradients that need no copy when they leave, such as an engine's weights that a sync writes anyway."""

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


def policies(offload: ComponentOffload, residency: Residency) -> dict[StateKind, OffloadPolicy]:
    """Of a component by kind; with ``residency: Resident`` nothing ever leaves."""
    if residency is Residency.RESIDENT:
        return dict.fromkeys(StateKind, OffloadPolicy.NEVER)
    return {
        StateKind.PARAMS: offload.weight,
        StateKind.GRADS: offload.grad,
        StateKind.OPTIMIZER: offload.optimizer,
        StateKind.KV_CACHE: offload.kv_cache,
    }


def estimated(needs: ProcessNeeds) -> tuple[dict[StateKind, int], int, int]:
    """(``size_bytes``, ``fixed_bytes``, ``working_bytes``) of a process, from the memory estimate.

    Gradients only exist while a phase runs, and count with the largest they get; workspace is that of the phase with most of it.
    """
    size_bytes = _by_kind(needs.states)
    workspace = 0
    for working in needs.working.values():
        for kind, num_bytes in _by_kind(working).items():
            size_bytes[kind] = max(size_bytes.get(kind, 0), num_bytes)
        workspace = max(workspace, sum(need.num_bytes for need in working if need.kind is Kind.WORKSPACE))
    fixed = sum(need.num_bytes for need in needs.states if need.kind not in _KIND_OF)
    return size_bytes, fixed, workspace


def _by_kind(needs: Iterable[Need]) -> dict[StateKind, int]:
    sizes: dict[StateKind, int] = {}
    for need in needs:
        kind = _KIND_OF.get(need.kind)
        if kind is not None:
            sizes[kind] = sizes.get(kind, 0) + need.num_bytes
    return sizes
