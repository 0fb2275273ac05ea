"""Makes the turns of a job whose components share devices: tenants of running workers, their sizes, budgets and policies.

::

    spec, plan ── shared_devices ──> who is a tenant: trainer, reference, critic, and each engine that has a device in common with others
    ModelShape ── process_needs ──> sizes ─┐
    node groups ── deviceMemory ─> budgets ┴─> DeviceArbiter ─> ArbiterTurns

With ``residency: Resident`` nothing moves, but trainer and engines still use shared devices in turn. With ``Switching`` the policy
workers start first and step aside before engines start. Engines on devices of their own are no tenants: they never stop for others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from rljob_api.memory import ModelShape, process_needs
from rljob_api.memory.training_needs import DTYPE_BYTES, MASTER_BYTES
from rljob_api.memory.units import quantity_bytes
from rljob_api.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import ComponentOffload, OffloadPolicy, Role
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.engine.protocol import EngineResidenceError
from rljob_runtime.engine.residence import ENGINE_KINDS
from rljob_runtime.errors import OffloadError
from rljob_runtime.loop.driver import IO_TIMEOUT_S
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.records import SwitchRecord
from rljob_runtime.offload.states import StateKind, SwitchReport
from rljob_runtime.offload.tenants import Sizes, Tenant, TenantProcess, estimated, local_devices, policies
from rljob_runtime.offload.turns import ArbiterTurns, NoTurns, Turns

POLICY_ROLES = (Role.TRAINER, Role.REFERENCE, Role.CRITIC)
TRAINED_ROLES = (Role.TRAINER, Role.CRITIC)
TENANT_ROLES = (*POLICY_ROLES, Role.ROLLOUT)
REFERENCE_KINDS = frozenset({StateKind.PARAMS, StateKind.OTHER})
TRAINER_KINDS = REFERENCE_KINDS | {StateKind.GRADS, StateKind.OPTIMIZER}
UNKNOWN_BYTES = 1 << 60
"""Budget of a device whose memory nobody says, or whose processes' sizes are not known: then every idle component leaves."""
GRACE_S = 10.0
"""How much longer than an engine's own deadline its answer may take."""
YEAR_S = 366 * 24 * 3600.0
"""Stands for no ``activeDeadlineSeconds``."""

Needs = Callable[[PlannedComponent, PlannedProcess], Sizes | None]
"""Sizes of a process; None where they are not known."""


def shared_devices(plan: Plan) -> frozenset[int]:
    """Global ranks of devices that more than one component of a model uses."""
    seen: set[int] = set()
    shared: set[int] = set()
    for component in plan.components:
        if component.role in TENANT_ROLES:
            devices = component.device_set()
            shared |= seen & devices
            seen |= devices
    return frozenset(shared)


def switches(spec: RLJobSpec, plan: Plan) -> bool:
    """Whether components leave device memory for each other."""
    return spec.offload.residency is Residency.SWITCHING and any(component.shares_devices_with for component in plan.components)


def takes_turns(spec: RLJobSpec, component: PlannedComponent, process: PlannedProcess, shared: Collection[int]) -> bool:
    """Whether a process leaves its devices for others: an engine that has one in common, any process of a policy that has.

    Args:
        spec: of the job.
        component: of its plan.
        process: of that component.
        shared: from :func:`shared_devices`, made once for all processes.
    """
    return spec.offload.residency is Residency.SWITCHING and _is_tenant(component, process, shared)


def optimizer_around_step(spec: RLJobSpec, component: PlannedComponent) -> bool:
    """Whether optimizer state is on the device only while a trainer or critic updates: ``offload.optimizer: Always`` where it switches."""
    is_asked = _offload(spec, component).optimizer is OffloadPolicy.ALWAYS
    switching = spec.offload.residency is Residency.SWITCHING
    return component.role in TRAINED_ROLES and is_asked and switching and bool(component.shares_devices_with)


def leaving(spec: RLJobSpec, component: PlannedComponent) -> tuple[StateKind, ...]:
    """Kinds that a policy gives up on the devices it shares; none where it shares nothing or stays."""
    if component.role not in POLICY_ROLES or not component.shares_devices_with:
        return ()
    has = TRAINER_KINDS if component.role in TRAINED_ROLES else REFERENCE_KINDS
    return tuple(sorted(has - _staying(spec, component)))


async def step_aside(spec: RLJobSpec, plan: Plan, by_role: Mapping[Role, Sequence[Worker]], timeout_s: float) -> None:
    """Take what may leave of policy workers off the devices they share, before engines start there and measure what is free.

    Raises:
        OffloadError: one cannot.
    """
    if not switches(spec, plan):
        return
    calls = []
    for component, workers in _with_workers(plan, by_role):
        if component.role in POLICY_ROLES and component.shares_devices_with:
            calls += [worker.start("offload", leaving(spec, component)) for worker in workers]
    await gather_all(calls, timeout_s)


def host_shares(spec: RLJobSpec, plan: Plan) -> dict[tuple[str, int], int]:
    """Host memory for offloaded state that each process of a policy may keep, by component name and node rank; empty: no limit.

    ``offload.hostMemoryBytes`` is divided among a node's processes as what they copy is, so that all have enough where the sum is enough.
    """
    total = spec.offload.host_memory_bytes
    if total is None:
        return {}
    copied = {component.name: _copied_per_parameter(spec, component) for component in plan.components}
    sums: dict[int, float] = {}
    places: set[tuple[str, int]] = set()
    for component in plan.components:
        if copied[component.name]:
            for process in component.processes:
                sums[process.node_rank] = sums.get(process.node_rank, 0.0) + copied[component.name]
                places.add((component.name, process.node_rank))
    return {(name, node): int(total * copied[name] / sums[node]) for name, node in sorted(places)}


def hold_s(spec: RLJobSpec) -> float:
    """Deadline of a lease, in seconds: later than the end of any block that keeps its own deadlines.

    Blocks are bounded by what happens in them: generation by ``rollout.stallTimeoutSeconds`` without progress, an update by
    ``training.stepTimeoutSeconds``, checkpoints by ``IO_TIMEOUT_S``, a sync by ``weightSync.timeoutSeconds``. Only their sum over a whole
    attempt is known before, ``activeDeadlineSeconds`` or a year; on top come the update and the checkpoint under way at that moment.
    """
    return (spec.active_deadline_seconds or YEAR_S) + spec.training.step_timeout_seconds + IO_TIMEOUT_S


def turns_of(
    spec: RLJobSpec,
    plan: Plan,
    by_role: Mapping[Role, Sequence[Worker]],
    shape: ModelShape | None = None,
    on_switch: Callable[[SwitchRecord], None] = lambda record: None,
) -> Turns:
    """Turns for running workers; what may leave of policy workers that switch has stepped aside. Call in the event loop.

    Args:
        spec: of the job.
        plan: of that spec.
        by_role: workers by role, by rank.
        shape: of the model; None: sizes are not known.
        on_switch: told of every switch.

    Raises:
        NoRoomError: what started does not fit; validation refuses such jobs where all sizes are known.
    """
    shared = shared_devices(plan)
    if not shared:
        return NoTurns()
    sizes, budgets = _sizes(spec, plan, shape), _budgets(spec, plan, shape)
    arbiter = DeviceArbiter(budgets, hold_s=hold_s(spec), on_switch=on_switch)
    policy_names: dict[Role, list[str]] = {role: [] for role in POLICY_ROLES}
    engines: dict[int, str] = {}
    resident = spec.offload.residency is Residency.RESIDENT
    num_engines = 0
    for component, workers in _with_workers(plan, by_role):
        pairs = list(zip(component.processes, workers, strict=True))
        if component.role is Role.ROLLOUT:
            for index, (process, worker) in enumerate(pairs, start=num_engines):
                if _is_tenant(component, process, shared):
                    arbiter.add(_tenant(spec, component, worker.name, [(process, EngineMoves(worker))], sizes, budgets))
                    engines[index] = worker.name
            num_engines += len(pairs)
        elif component.shares_devices_with:
            tenant = _tenant(spec, component, component.name, pairs, sizes, budgets)
            arbiter.add(tenant, resident=None if resident else _staying(spec, component) & tenant.kinds)
            policy_names[component.role].append(component.name)
    return ArbiterTurns(
        arbiter,
        trainers=policy_names[Role.TRAINER],
        references=policy_names[Role.REFERENCE],
        critics=policy_names[Role.CRITIC],
        engines=engines,
        timeout_s=float(spec.training.step_timeout_seconds),
    )


def _is_tenant(component: PlannedComponent, process: PlannedProcess, shared: Collection[int]) -> bool:
    if component.role in POLICY_ROLES:
        return bool(component.shares_devices_with)
    return component.role is Role.ROLLOUT and any(device in shared for device in process.devices)


def _with_workers(plan: Plan, by_role: Mapping[Role, Sequence[Worker]]) -> Iterator[tuple[PlannedComponent, Sequence[Worker]]]:
    """Components with a model, each with its workers."""
    taken = dict.fromkeys(TENANT_ROLES, 0)
    for component in plan.components:
        if component.role in taken:
            first = taken[component.role]
            taken[component.role] += component.world_size
            yield component, by_role[component.role][first : taken[component.role]]


def _offload(spec: RLJobSpec, component: PlannedComponent) -> ComponentOffload:
    return next(written.offload for written in spec.components if written.name == component.name)


def _staying(spec: RLJobSpec, component: PlannedComponent) -> frozenset[StateKind]:
    """Kinds of a policy that never leave."""
    wanted = policies(_offload(spec, component), spec.offload.residency)
    return frozenset(kind for kind, policy in wanted.items() if policy is OffloadPolicy.NEVER)


def _kinds(spec: RLJobSpec, component: PlannedComponent) -> frozenset[StateKind]:
    """What moves on the arbiter's word."""
    if component.role is Role.ROLLOUT:
        return ENGINE_KINDS
    if component.role is Role.REFERENCE:
        return REFERENCE_KINDS
    return TRAINER_KINDS - {StateKind.OPTIMIZER} if optimizer_around_step(spec, component) else TRAINER_KINDS


def _copied_per_parameter(spec: RLJobSpec, component: PlannedComponent) -> float:
    """Bytes that each process of a policy copies to host memory, for each parameter of the model."""
    if component.role not in POLICY_ROLES or not component.shares_devices_with:
        return 0.0
    staying = _staying(spec, component)
    frozen = component.role is Role.REFERENCE
    weights = 0 if StateKind.PARAMS in staying else DTYPE_BYTES[spec.model.dtype] if frozen else MASTER_BYTES
    moments = 0 if frozen or StateKind.OPTIMIZER in staying else 2 * MASTER_BYTES
    return (weights + moments) / component.world_size


def _sizes(spec: RLJobSpec, plan: Plan, shape: ModelShape | None) -> Needs:
    """From the memory estimate, computed once for equal processes."""
    if shape is None:
        return lambda component, process: None
    needs = process_needs(spec, plan, shape)
    return lambda component, process: estimated(needs(component, process), _kinds(spec, component))


def _budgets(spec: RLJobSpec, plan: Plan, shape: ModelShape | None) -> dict[Device, int]:
    """Of every device."""
    memory = {group.name: group.device_memory if shape is not None else None for group in spec.node_groups}
    return {
        Device(node.rank, index): quantity_bytes(text) if (text := memory[node.group]) is not None else UNKNOWN_BYTES
        for node in plan.nodes
        for index in range(node.num_devices)
    }


def _tenant(
    spec: RLJobSpec,
    component: PlannedComponent,
    name: str,
    workers: Sequence[tuple[PlannedProcess, Any]],
    sizes: Needs,
    budgets: Mapping[Device, int],
) -> Tenant:
    """Some processes of a component with their workers; Auto is Always where nobody knows how much room there is."""
    is_engine = component.role is Role.ROLLOUT
    wanted = policies(_offload(spec, component), spec.offload.residency, is_engine=is_engine)
    processes = [_tenant_process(spec, component, process, worker, sizes) for process, worker in workers]
    if any(budgets[device] == UNKNOWN_BYTES for process in processes for device in process.devices):
        wanted = {kind: OffloadPolicy.ALWAYS if policy is OffloadPolicy.AUTO else policy for kind, policy in wanted.items()}
    return Tenant(
        name=name,
        processes=tuple(processes),
        policies=wanted,
        rederivable=frozenset({StateKind.PARAMS}) if is_engine else frozenset(),
    )


def _tenant_process(spec: RLJobSpec, component: PlannedComponent, process: PlannedProcess, worker: Any, sizes: Needs) -> TenantProcess:
    known = sizes(component, process) or Sizes(size_bytes=dict.fromkeys(sorted(_kinds(spec, component)), 0))
    return TenantProcess(
        worker=worker,
        devices=local_devices(process),
        size_bytes=known.size_bytes,
        fixed_bytes=known.fixed_bytes,
        working_bytes=known.working_bytes,
        partial_working_bytes=known.partial_working_bytes,
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
