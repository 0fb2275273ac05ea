"""The one planner: spec in, plan out. Pure: no clock, no environment, no machine, no I/O.

Called by the CLI, the operator, the local run and the driver inside the pods, which all must agree.

Invariants: PLAN-PURE the same spec gives the same plan everywhere. UNIT-EXISTS no process on a device that does not exist,
none twice in a component. A process never spans two nodes. Time and memory grow with nodes + processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rljob_api import device_mapping, ranks
from rljob_api.errors import FieldError, PlacementTextError, SpecInvalidError, show
from rljob_api.plan import PlacementMode, Plan, PlannedComponent, PlannedNode, PlannedProcess
from rljob_api.v1alpha1.components import Component, Role
from rljob_api.v1alpha1.nodes import NodeGroup
from rljob_api.v1alpha1.rljob import RLJobSpec

CPU_ROLES = frozenset({Role.REWARD, Role.ENVIRONMENT})
"""Roles that run as plain CPU processes."""


def plan(spec: RLJobSpec) -> Plan:
    """Place every process of a job.

    Raises:
        SpecInvalidError: with every placement problem of the spec.
    """
    result = plan_or_errors(spec)
    if isinstance(result, Plan):
        return result
    raise SpecInvalidError(result)


def plan_or_errors(spec: RLJobSpec) -> Plan | list[FieldError]:
    """Like :func:`plan`, but returns the problems, in spec order."""
    errors = [
        *_repeated([group.name for group in spec.node_groups], "spec.nodeGroups"),
        *_repeated([component.name for component in spec.components], "spec.components"),
    ]
    nodes = _nodes(spec.node_groups)
    processes: list[tuple[PlannedProcess, ...]] = []
    for index, component in enumerate(spec.components):
        planned = _ComponentPlanner(f"spec.components[{index}]", component, spec.node_groups, nodes).run()
        if isinstance(planned, FieldError):
            errors.append(planned)
        else:
            processes.append(planned)
    if errors:
        return errors
    components = _with_sharing(spec.components, processes)
    return Plan(nodes=nodes, components=components, mode=_mode(components))


def engine_size(component: Component) -> int:
    """Devices of one process: tensor times pipeline parallel size of a Rollout's engine, else 1."""
    if component.role is Role.ROLLOUT and component.engine is not None:
        return component.engine.tensor_parallel_size * component.engine.pipeline_parallel_size
    return 1


def _repeated(names: Sequence[str], path: str) -> Iterable[FieldError]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            yield FieldError(
                path=f"{path}[{index}].name",
                value=show(name),
                problem=f"is already the name of {path}[{first[name]}]",
                remedy="give every entry its own name",
            )
        first.setdefault(name, index)


def _nodes(groups: Sequence[NodeGroup]) -> tuple[PlannedNode, ...]:
    nodes: list[PlannedNode] = []
    first_device = 0
    for group in groups:
        for index in range(group.nodes):
            nodes.append(
                PlannedNode(
                    rank=len(nodes),
                    group=group.name,
                    index=index,
                    num_devices=group.devices_per_node,
                    device_resource=group.device_resource,
                    first_device=first_device,
                )
            )
            first_device += group.devices_per_node
    return tuple(nodes)


def _with_sharing(components: Sequence[Component], processes: Sequence[tuple[PlannedProcess, ...]]) -> tuple[PlannedComponent, ...]:
    users: dict[int, int] = {}
    """Device -> bit set of the components on it."""
    for index, of_component in enumerate(processes):
        for process in of_component:
            for device in process.devices:
                users[device] = users.get(device, 0) | 1 << index
    neighbours = [0] * len(components)
    for bits in users.values():
        if bits & (bits - 1):
            for index in range(len(components)):
                if bits >> index & 1:
                    neighbours[index] |= bits & ~(1 << index)
    return tuple(
        PlannedComponent(
            name=component.name,
            role=component.role,
            processes=processes[index],
            shares_devices_with=tuple(other.name for j, other in enumerate(components) if neighbours[index] >> j & 1),
        )
        for index, component in enumerate(components)
    )


def _mode(components: Iterable[PlannedComponent]) -> PlacementMode:
    devices: dict[Role, set[int]] = {Role.TRAINER: set(), Role.ROLLOUT: set()}
    for component in components:
        if component.role in devices:
            devices[component.role].update(component.devices)
    trainer, rollout = devices[Role.TRAINER], devices[Role.ROLLOUT]
    if not trainer & rollout:
        return PlacementMode.DISAGGREGATED
    return PlacementMode.COLLOCATED if trainer == rollout else PlacementMode.HYBRID


class _Rejected(Exception):
    """Carries one problem up to :meth:`_ComponentPlanner.run`."""

    def __init__(self, error: FieldError) -> None:
        super().__init__(error)
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    rank: int
    """Global rank."""
    node: PlannedNode


class _ComponentPlanner:
    """Places the processes of one component."""

    def __init__(self, path: str, component: Component, groups: Sequence[NodeGroup], nodes: Sequence[PlannedNode]) -> None:
        self._path = path
        self._component = component
        self._groups = groups
        self._all_nodes = nodes

    def run(self) -> tuple[PlannedProcess, ...] | FieldError:
        """The processes by rank, or the first problem of this component."""
        try:
            field, text = self._field()
            nodes = self._selected_nodes()
            if field == "workers":
                count = self._component.placement.workers or 0
                return _processes((nodes[rank % len(nodes)], ()) for rank in range(count))
            return _processes(self._on_devices(field, text, nodes))
        except _Rejected as rejected:
            return rejected.error

    def _reject(self, field: str, value: object, problem: str, remedy: str) -> _Rejected:
        shown = None if value is None else show(value)
        return _Rejected(FieldError(path=f"{self._path}.placement{field}", value=shown, problem=problem, remedy=remedy))

    def _field(self) -> tuple[str, str]:
        """Which of the three placement fields is used, and its text."""
        placement, role = self._component.placement, self._component.role
        given = {"ranks": placement.ranks, "deviceMapping": placement.device_mapping, "workers": placement.workers}
        used = [name for name, value in given.items() if value is not None]
        if len(used) != 1:
            raise self._reject(
                "",
                None,
                f"gives {' and '.join(used)} at the same time" if used else "says nothing about where to run",
                "give exactly one of ranks, deviceMapping and workers",
            )
        if used[0] == "workers" and role not in CPU_ROLES:
            raise self._reject(
                ".workers", placement.workers, f"a {role} needs devices, workers are CPU-only", "give ranks or deviceMapping instead"
            )
        self._check_devices_per_worker(used[0])
        return used[0], str(given[used[0]])

    def _check_devices_per_worker(self, used: str) -> None:
        stated, needed = self._component.placement.devices_per_worker, engine_size(self._component)
        if stated is None:
            return
        if used != "deviceMapping":
            raise self._reject(".devicesPerWorker", stated, f"has no meaning together with {used}", "remove it, or use deviceMapping")
        if stated != needed:
            role = self._component.role
            why = "engine.tensorParallelSize * engine.pipelineParallelSize" if role is Role.ROLLOUT else f"what one {role} process uses"
            raise self._reject(".devicesPerWorker", stated, f"differs from {needed}, {why}", f"write {needed} or leave it out")

    def _selected_nodes(self) -> Sequence[PlannedNode]:
        """Nodes of the chosen groups, groups in the order in which the placement names them."""
        names = self._component.placement.node_groups
        if not names:
            return self._all_nodes
        known = [group.name for group in self._groups]
        for index, name in enumerate(names):
            if name not in known:
                raise self._reject(
                    f".nodeGroups[{index}]", name, f"no node group has this name, there are {', '.join(known)}", "name an existing group"
                )
        repeated = next((name for name, count in Counter(names).items() if count > 1), None)
        if repeated is not None:
            raise self._reject(".nodeGroups", list(names), f"names {repeated} twice", "name every group once")
        by_group: dict[str, list[PlannedNode]] = {name: [] for name in names}
        for node in self._all_nodes:
            if node.group in by_group:
                by_group[node.group].append(node)
        return [node for name in names for node in by_group[name]]

    def _on_devices(self, field: str, text: str, nodes: Sequence[PlannedNode]) -> Iterable[tuple[PlannedNode, tuple[int, ...]]]:
        ends: list[int] = []
        """ends[i]: how many of the selected devices lie on the first i + 1 nodes."""
        for node in nodes:
            ends.append((ends[-1] if ends else 0) + node.num_devices)
        chosen = self._chosen(field, text, ends[-1])
        size = engine_size(self._component)
        if len(chosen) % size:
            low = len(chosen) // size * size
            near = f"{low} or {low + size}" if low else f"{size}"
            raise self._reject(
                f".{field}",
                text,
                f"selects {len(chosen)} devices, which the engine's {size} devices per process do not divide",
                f"select {near} devices, or change engine.tensorParallelSize",
            )
        for start in range(0, len(chosen), size):
            devices = [self._locate(rank, nodes, ends) for rank in chosen[start : start + size]]
            there = devices[0].node
            stray = next((device.node for device in devices if device.node.rank != there.rank), None)
            if stray is not None:
                raise self._reject(
                    f".{field}",
                    text,
                    f"puts process {start // size} on two nodes, {_node_name(there)} and {_node_name(stray)}",
                    f"align every {size} consecutive devices with a node",
                )
            yield there, tuple(device.rank for device in devices)

    def _chosen(self, field: str, text: str, num_available: int) -> Sequence[int]:
        try:
            if field == "deviceMapping":
                return device_mapping.parse(text, num_available)
            rank_map = ranks.parse(text)
            chosen = rank_map.resolve(num_available)
        except PlacementTextError as error:
            raise self._reject(f".{field}", text, error.problem, error.remedy) from None
        if rank_map.has_process_ranks:
            raise self._reject(
                ".ranks", text, "process ranks after a colon are not supported yet", "leave them out: one process per device"
            )
        return chosen

    @staticmethod
    def _locate(rank: int, nodes: Sequence[PlannedNode], ends: Sequence[int]) -> _Device:
        position = bisect_right(ends, rank)
        node = nodes[position]
        return _Device(rank=node.first_device + rank - (ends[position] - node.num_devices), node=node)


def _node_name(node: PlannedNode) -> str:
    return f"node {node.rank} ({node.group}[{node.index}])"


def _processes(placed: Iterable[tuple[PlannedNode, tuple[int, ...]]]) -> tuple[PlannedProcess, ...]:
    """Number the processes, overall and per node."""
    items = list(placed)
    totals = Counter(node.rank for node, _ in items)
    seen: Counter[int] = Counter()
    processes: list[PlannedProcess] = []
    for rank, (node, devices) in enumerate(items):
        processes.append(
            PlannedProcess(
                rank=rank,
                node_rank=node.rank,
                local_devices=tuple(device - node.first_device for device in devices),
                devices=devices,
                local_rank=seen[node.rank],
                local_world_size=totals[node.rank],
            )
        )
        seen[node.rank] += 1
    return tuple(processes)
