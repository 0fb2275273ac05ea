"""Leases of a job whose components share devices: who is a client of the arbiter, with which sizes, budgets and policies.

::

    spec, plan ── shared_devices ──> clients: components that compute in collectives, and each engine on a shared device
    ModelShape ── process_needs ──> sizes ─┐
    node groups ── deviceMemory ─> budgets ┴─> DeviceArbiter, clients of each component ──> WorkerGroup

With ``residency: Resident`` nothing moves, but trainer and engines still use shared devices one after the other. With ``Switching`` the
policy workers start first and release their devices before engines start. Engines on devices of their own are no clients.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rljob_api.dtypes import DTYPE_BYTES, optimizer_state_bytes
from rljob_api.memory import ModelShape, Served, process_needs, served_shapes
from rljob_api.memory.training_needs import MASTER_BYTES
from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.quantities import rounded_down
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import ComponentOffload, Engine, OffloadPolicy
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.engine.protocol import EngineResidenceError
from rljob_runtime.engine.registry import engine_adapter
from rljob_runtime.errors import OffloadError
from rljob_runtime.job.roles import ROLES, DeviceUse, LeaseUnit
from rljob_runtime.job.worker_settings import component_spec, device_type
from rljob_runtime.loop.driver import NO_DEADLINE_S
from rljob_runtime.loop.saving import IO_TIMEOUT_S
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.clients import ClientProcess, DeviceClient, Sizes, StateMover, estimated, local_devices, policies
from rljob_runtime.offload.plan import UNKNOWN_BYTES, Device
from rljob_runtime.offload.records import SwitchRecord
from rljob_runtime.offload.states import StateKind, SwitchReport

GRACE_S = 10.0
"""How much longer than an engine's own deadline its answer may take."""

Needs = Callable[[PlannedComponent, PlannedProcess], Sizes | None]
"""Sizes of a process; None where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLeases:
    """How the components of a job lease devices."""

    arbiter: DeviceArbiter | None
    """None: no component shares devices."""
    clients: Mapping[str, tuple[str, ...]]
    """Clients of each component that shares devices, by its name."""


def shared_devices(plan: Plan) -> frozenset[int]:
    """Global ranks of devices that more than one component of a model uses."""
    seen: set[int] = set()
    shared: set[int] = set()
    for component in plan.components:
        if ROLES[component.role].lease is not LeaseUnit.NONE:
            devices = component.device_set()
            shared |= seen & devices
            seen |= devices
    return frozenset(shared)


def switches(spec: RLJobSpec, plan: Plan) -> bool:
    """Whether components leave device memory for each other."""
    return spec.offload.residency is Residency.SWITCHING and any(component.shares_devices_with for component in plan.components)


def device_uses(spec: RLJobSpec, plan: Plan) -> Callable[[PlannedComponent, PlannedProcess], DeviceUse]:
    """How each process uses shared devices; what all have in common is computed once."""
    shared, host = shared_devices(plan), _host_shares(spec, plan)

    def use(component: PlannedComponent, process: PlannedProcess) -> DeviceUse:
        return DeviceUse(
            releases=spec.offload.residency is Residency.SWITCHING and _is_leased(component, process, shared),
            releases_kinds=_leaving(spec, component),
            host_bytes=host.get((component.name, process.node_rank)),
            optimizer_around_step=_optimizer_around_step(spec, component),
        )

    return use


def start_stages(spec: RLJobSpec, plan: Plan) -> list[list[PlannedComponent]]:
    """Components that start together, stage by stage: a single stage unless an engine has to measure what others left free.

    A server on shared devices measures that, too, and leaves as soon as it is up: it starts alone, behind the policies.
    """
    if not switches(spec, plan):
        return [list(plan.components)]
    early = [component for component in plan.components if ROLES[component.role].start_stage == 0]
    first = [component for component in early if not ROLES[component.role].serves]
    alone = [component for component in early if ROLES[component.role].serves and component.shares_devices_with]
    last = [component for component in plan.components if component not in (*first, *alone)]
    return [stage for stage in (first, *([component] for component in alone), last) if stage]


async def release_devices(
    spec: RLJobSpec, components: Sequence[PlannedComponent], running: Mapping[str, Sequence[Worker]], timeout_s: float
) -> None:
    """Offload what may leave the shared devices, before the next stage starts there and measures what is free.

    Raises:
        OffloadError: a worker cannot.
    """
    calls = []
    for component in components:
        if kinds := _leaving(spec, component):
            calls += [worker.start("offload", kinds) for worker in running[component.name]]
    await gather_all(calls, timeout_s)


def hold_s(spec: RLJobSpec) -> float:
    """Deadline of a lease, in seconds: later than the end of any block that keeps its own deadlines.

    Blocks are bounded by what happens in them: generation by ``rollout.stallTimeoutSeconds`` without progress, an update by
    ``training.stepTimeoutSeconds``, checkpoints by ``IO_TIMEOUT_S``, a sync by ``weightSync.timeoutSeconds``. Only their sum over a whole
    attempt is known before, ``activeDeadlineSeconds`` or a year; on top come the update and the checkpoint under way at that moment.
    """
    return (spec.active_deadline_seconds or NO_DEADLINE_S) + spec.training.step_timeout_seconds + IO_TIMEOUT_S


def lease_devices(
    spec: RLJobSpec,
    plan: Plan,
    running: Mapping[str, Sequence[Worker]],
    shape: ModelShape | None = None,
    on_switch: Callable[[SwitchRecord], None] = lambda record: None,
    *,
    served: Served | None = None,
) -> DeviceLeases:
    """The arbiter over running workers, once those that switch have released their devices. Call in the event loop.

    Args:
        spec: of the job.
        plan: of that spec.
        running: workers of each component by its name, in rank order.
        shape: of the model; None: sizes are not known.
        on_switch: called after every switch.
        served: sizes of models that components have of their own; None takes what the spec says.

    Raises:
        NoRoomError: what started does not fit; validation refuses such jobs where all sizes are known.
    """
    shared = shared_devices(plan)
    if not shared:
        return DeviceLeases(arbiter=None, clients={})
    served = served_shapes(spec) if served is None else served
    sizes, budgets = process_sizes(spec, plan, shape, served), device_budgets(spec, plan, shape, served)
    arbiter = DeviceArbiter(budgets, hold_s=hold_s(spec), on_switch=on_switch)
    resident = spec.offload.residency is Residency.RESIDENT
    clients: dict[str, list[str]] = {}
    for component in plan.components:
        leased = [pair for pair in zip(component.processes, running[component.name], strict=True) if _is_leased(component, pair[0], shared)]
        if not leased:
            continue
        units: list[tuple[str, Sequence[tuple[PlannedProcess, StateMover]]]]
        if ROLES[component.role].lease is LeaseUnit.PROCESS:
            units = [(worker.name, [(process, EngineMover(worker))]) for process, worker in leased]
        else:
            units = [(component.name, leased)]
        for name, workers in units:
            client = _client(spec, component, name, workers, sizes, budgets)
            if _leaves_alone(spec, component) and any(device_type(spec, plan, process) is not DeviceType.CPU for process, _ in workers):
                client = replace(client, leaves_alone=True)
            stays = ROLES[component.role].lease is LeaseUnit.COMPONENT and not resident
            arbiter.add(client, resident=_staying(spec, component) & client.kinds if stays else None)
            clients.setdefault(component.name, []).append(name)
    return DeviceLeases(arbiter=arbiter, clients={name: tuple(names) for name, names in clients.items()})


def _is_leased(component: PlannedComponent, process: PlannedProcess, shared: Collection[int]) -> bool:
    """Whether a process computes under a lease: any of a component that shares devices, or, leased alone, one on a shared device."""
    unit = ROLES[component.role].lease
    if unit is LeaseUnit.COMPONENT:
        return bool(component.shares_devices_with)
    return unit is LeaseUnit.PROCESS and any(device in shared for device in process.devices)


def _optimizer_around_step(spec: RLJobSpec, component: PlannedComponent) -> bool:
    """Whether optimizer state is on the device only for an update: ``offload.optimizer: Always`` on a component that switches."""
    is_asked = _offload(spec, component).optimizer is OffloadPolicy.ALWAYS
    switching = spec.offload.residency is Residency.SWITCHING
    return ROLES[component.role].trains and is_asked and switching and bool(component.shares_devices_with)


def _leaving(spec: RLJobSpec, component: PlannedComponent) -> tuple[StateKind, ...]:
    """Kinds that a component with a lease of its own gives up on the devices it shares; none where it shares nothing or stays."""
    description = ROLES[component.role]
    if description.lease is not LeaseUnit.COMPONENT or not component.shares_devices_with:
        return ()
    return tuple(sorted(description.state_kinds - _staying(spec, component)))


def _host_shares(spec: RLJobSpec, plan: Plan) -> dict[tuple[str, int], int]:
    """Host memory for offloaded state that each process of a policy may keep, by component name and node rank; empty: no limit.

    ``offload.hostMemoryBytes`` is divided among a node's processes as what they copy is, so that all have enough where the sum is enough.
    """
    total = spec.offload.host_memory_bytes
    if total is None:
        return {}
    copied = {component.name: _copied_per_parameter(spec, component) for component in plan.components}
    sums: dict[int, float] = {}
    holders: set[tuple[str, int]] = set()
    for component in plan.components:
        if copied[component.name]:
            for process in component.processes:
                sums[process.node_rank] = sums.get(process.node_rank, 0.0) + copied[component.name]
                holders.add((component.name, process.node_rank))
    return {(name, node): int(total * copied[name] / sums[node]) for name, node in sorted(holders)}


def _copied_per_parameter(spec: RLJobSpec, component: PlannedComponent) -> float:
    """Bytes that each process of a policy copies to host memory, for each parameter of the model."""
    description = ROLES[component.role]
    if description.lease is not LeaseUnit.COMPONENT or not component.shares_devices_with:
        return 0.0
    staying = _staying(spec, component)
    weights = 0 if StateKind.PARAMS in staying else MASTER_BYTES if description.trains else DTYPE_BYTES[spec.model.dtype]
    moments = 0 if not description.trains or StateKind.OPTIMIZER in staying else optimizer_state_bytes(spec.training)
    return (weights + moments) / component.world_size


def _offload(spec: RLJobSpec, component: PlannedComponent) -> ComponentOffload:
    return component_spec(spec, component.name).offload


def _staying(spec: RLJobSpec, component: PlannedComponent) -> frozenset[StateKind]:
    """Kinds of a component that never leave."""
    wanted = policies(_offload(spec, component), spec.offload.residency)
    return frozenset(kind for kind, policy in wanted.items() if policy is OffloadPolicy.NEVER)


def _moved_kinds(spec: RLJobSpec, component: PlannedComponent) -> frozenset[StateKind]:
    """What the arbiter moves."""
    around_step = {StateKind.OPTIMIZER} if _optimizer_around_step(spec, component) else set()
    return ROLES[component.role].state_kinds - around_step


def process_sizes(spec: RLJobSpec, plan: Plan, shape: ModelShape | None, served: Served) -> Needs:
    """Sizes from the memory estimate, computed once for equal processes."""
    if shape is None:
        return lambda component, process: None
    needs = process_needs(spec, plan, shape, served)

    def sizes(component: PlannedComponent, process: PlannedProcess) -> Sizes | None:
        if TRAITS[component.role].has_own_model and component.name not in served:
            return None
        return estimated(needs(component, process), _moved_kinds(spec, component))

    return sizes


def device_budgets(spec: RLJobSpec, plan: Plan, shape: ModelShape | None, served: Served) -> dict[Device, int]:
    """Bytes that may be resident on each device; unknown where a process of unknown size is."""
    unknown = [c for c in plan.components if TRAITS[c.role].has_own_model and c.name not in served]
    own = {device for c in unknown for p in c.processes for device in local_devices(p)}
    memory = {group.name: group.device_memory if shape is not None else None for group in spec.node_groups}
    return {
        device: rounded_down(text) if (text := memory[node.group]) is not None and device not in own else UNKNOWN_BYTES
        for node in plan.nodes
        for index in range(node.num_devices)
        if (device := Device(node.rank, index))
    }


def _client(
    spec: RLJobSpec,
    component: PlannedComponent,
    name: str,
    workers: Sequence[tuple[PlannedProcess, StateMover]],
    sizes: Needs,
    budgets: Mapping[Device, int],
) -> DeviceClient:
    """Some processes of a component with their workers; Auto is Always where the room on a device is not known."""
    description = ROLES[component.role]
    wanted = policies(_offload(spec, component), spec.offload.residency, has_cache=StateKind.KV_CACHE in description.state_kinds)
    processes = [_client_process(spec, component, process, worker, sizes) for process, worker in workers]
    if any(budgets[device] == UNKNOWN_BYTES for process in processes for device in process.devices):
        wanted = {kind: OffloadPolicy.ALWAYS if policy is OffloadPolicy.AUTO else policy for kind, policy in wanted.items()}
    return DeviceClient(name=name, processes=tuple(processes), policies=wanted, rederivable=description.rederived_kinds)


def _leaves_alone(spec: RLJobSpec, component: PlannedComponent) -> bool:
    """Whether nothing may come to a component's accelerators while it leaves them.

    vLLM's workers, servers of judges among them, end with an error where less memory is free after they fell asleep than before, whoever
    took it.
    """
    description = ROLES[component.role]
    if description.lease is not LeaseUnit.PROCESS:
        return description.serves
    return engine_adapter((component_spec(spec, component.name).engine or Engine()).type).leaves_alone


def _client_process(
    spec: RLJobSpec, component: PlannedComponent, process: PlannedProcess, worker: StateMover, sizes: Needs
) -> ClientProcess:
    known = sizes(component, process) or Sizes(size_bytes=dict.fromkeys(sorted(_moved_kinds(spec, component)), 0))
    return ClientProcess(
        worker=worker,
        devices=local_devices(process),
        size_bytes=known.size_bytes,
        fixed_bytes=known.fixed_bytes,
        working_bytes=known.working_bytes,
        partial_working_bytes=known.partial_working_bytes,
    )


class EngineMover:
    """An engine as the arbiter knows workers: it moves what it has, within the arbiter's deadline."""

    def __init__(self, worker: Worker) -> None:
        """Wrap a running engine."""
        self._worker = worker

    @property
    def name(self) -> str:
        """The engine's name."""
        return self._worker.name

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``offload`` or ``load``; its argument is the kinds.

        Raises:
            OffloadError: the engine refuses; nothing was changed.
        """
        (kinds,) = args
        try:
            report: SwitchReport = await self._worker.call(method, tuple(kinds), timeout_s, timeout_s=timeout_s + GRACE_S)
        except EngineResidenceError as error:
            raise OffloadError(f"{self._worker.name}: {error}", rolled_back=True) from error
        return report
