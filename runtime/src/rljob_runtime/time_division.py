"""Makes the turns of a job whose components share devices: tenants of running workers, budgets, policies.

``residency: Resident`` needs none: everything stays, synchronous phases follow each other anyway, and the memory estimate has said
that it fits. With ``Switching`` the policy workers start first and step aside before engines start.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rljob_api.memory.units import quantity_bytes
from rljob_api.plan import Plan, PlannedComponent
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import OffloadPolicy, Role
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.engine.protocol import EngineResidenceError
from rljob_runtime.engine.residence import ENGINE_KINDS
from rljob_runtime.errors import OffloadError
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.states import StateKind, SwitchReport
from rljob_runtime.offload.tenants import Tenant, TenantProcess, local_devices, policies
from rljob_runtime.offload.turns import ArbiterTurns, NoTurns, Turns

POLICY_ROLES = (Role.TRAINER, Role.REFERENCE)
TRAINER_KINDS = (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER, StateKind.OTHER)
REFERENCE_KINDS = (StateKind.PARAMS, StateKind.OTHER)
UNKNOWN_BYTES = 1 << 60
"""Budget of a device whose memory nobody says: then every idle component leaves."""
GRACE_S = 10.0
"""How much longer than an engine's own deadline its answer may take."""


def switches(spec: RLJobSpec, plan: Plan) -> bool:
    """Whether components take turns in device memory."""
    return spec.offload.residency is Residency.SWITCHING and any(component.shares_devices_with for component in plan.components)


def takes_turns(spec: RLJobSpec, component: PlannedComponent) -> bool:
    """Whether a component leaves its devices for others."""
    return spec.offload.residency is Residency.SWITCHING and bool(component.shares_devices_with)


async def step_aside(spec: RLJobSpec, plan: Plan, by_role: Mapping[Role, Sequence[Worker]], timeout_s: float) -> None:
    """Take policy workers off the devices they share, before engines start there.

    Raises:
        OffloadError: one cannot.
    """
    leaving = [w for c in plan.components if c.role in POLICY_ROLES and takes_turns(spec, c) for w in by_role[c.role]]
    await gather_all([worker.start("offload", tuple(StateKind)) for worker in leaving], timeout_s)


def host_bytes(spec: RLJobSpec, plan: Plan, node_rank: int) -> int | None:
    """The share of one policy worker in its node's host memory for offloaded state; None sets no limit."""
    if spec.offload.host_memory_bytes is None:
        return None
    sharing = [c for c in plan.components if c.role in POLICY_ROLES and takes_turns(spec, c)]
    workers = sum(process.node_rank == node_rank for c in sharing for process in c.processes)
    return spec.offload.host_memory_bytes // max(workers, 1)


def turns_of(spec: RLJobSpec, plan: Plan, by_role: Mapping[Role, Sequence[Worker]], budgets: Mapping[Device, int] | None = None) -> Turns:
    """Turns for running workers; policy workers that take turns have stepped aside.

    Args:
        spec: of the job.
        plan: of that spec.
        by_role: workers by role, by rank.
        budgets: memory of each device; None takes what the node groups say.
    """
    if not switches(spec, plan):
        return NoTurns()
    known = _budgets(spec, plan) if budgets is None else budgets
    arbiter = DeviceArbiter(known, hold_s=float(spec.training.step_timeout_seconds))
    names: dict[Role, list[str]] = {Role.TRAINER: [], Role.REFERENCE: [], Role.ROLLOUT: []}
    for component in plan.components:
        if component.role in names and takes_turns(spec, component):
            tenant = _tenant(spec, component, by_role[component.role], known)
            arbiter.add(tenant, resident=None if component.role is Role.ROLLOUT else ())
            names[component.role].append(component.name)
    return ArbiterTurns(
        arbiter,
        trainers=names[Role.TRAINER],
        references=names[Role.REFERENCE],
        engines=names[Role.ROLLOUT],
        timeout_s=float(spec.training.step_timeout_seconds),
    )


def _budgets(spec: RLJobSpec, plan: Plan) -> dict[Device, int]:
    """Of every device."""
    memory = {group.name: group.device_memory for group in spec.node_groups}
    return {
        Device(node.rank, index): quantity_bytes(text) if (text := memory[node.group]) is not None else UNKNOWN_BYTES
        for node in plan.nodes
        for index in range(node.num_devices)
    }


def _tenant(spec: RLJobSpec, component: PlannedComponent, workers: Sequence[Worker], budgets: Mapping[Device, int]) -> Tenant:
    is_engine = component.role is Role.ROLLOUT
    kinds: Iterable[StateKind] = sorted(ENGINE_KINDS) if is_engine else TRAINER_KINDS if component.role is Role.TRAINER else REFERENCE_KINDS
    written = next(c for c in spec.components if c.name == component.name)
    wanted = policies(written.offload, spec.offload.residency)
    if any(budgets[device] == UNKNOWN_BYTES for process in component.processes for device in local_devices(process)):
        wanted = {kind: OffloadPolicy.ALWAYS if policy is OffloadPolicy.AUTO else policy for kind, policy in wanted.items()}
    return Tenant(
        name=component.name,
        processes=tuple(
            TenantProcess(
                worker=EngineMoves(worker) if is_engine else worker,
                devices=local_devices(process),
                size_bytes=dict.fromkeys(kinds, 0),
            )
            for process, worker in zip(component.processes, workers, strict=True)
        ),
        policies=wanted,
        rederivable=frozenset({StateKind.PARAMS}) if is_engine else frozenset(),
    )


class EngineMoves:
    """An engine as the arbiter knows workers: it moves what it has, within the arbiter's deadline."""

    def __init__(self, worker: Worker) -> None:
        """Wrap a running engine."""
        self._worker = worker

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's own."""
        return getattr(self._worker, name)

    async def call(self, method: str, kinds: Collection[StateKind], *, timeout_s: float) -> SwitchReport:
        """``offload`` or ``load``.

        Raises:
            OffloadError: the engine refuses; nothing was changed.
        """
        try:
            report: SwitchReport = await self._worker.call(method, tuple(kinds), timeout_s, timeout_s=timeout_s + GRACE_S)
        except EngineResidenceError as error:
            raise OffloadError(f"{self._worker.name}: {error}", rolled_back=True) from error
        return report
