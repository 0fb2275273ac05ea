"""The plan as a grid, with identical nodes folded; nothing is left out, and :meth:`Grid.expand` gives every process back.

Two nodes of a group are identical when the same components sit on the same places with ranks in the same order. They fold when
node ranks and the first process rank of every component grow by constant steps: a fold is an arithmetic progression of nodes.
Time and memory grow with nodes + processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rljob_api.placement.topology import ACCELERATOR
from rljob_api.planning.plan import Plan, PlannedNode, PlannedProcess
from rljob_api.v1alpha1.components import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One process, seen from its node."""

    component: int
    """Index into :attr:`Grid.components`."""
    offset: int
    """Its rank minus the smallest rank of the component on the node."""
    kind: str | None
    """``Accelerator``, another hardware type, or None for a CPU process."""
    places: tuple[int, ...]
    """Indexes on the node of the units it uses; empty for a CPU process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seated:
    """One process of the plan, as the grid knows it."""

    component: int
    """Index into :attr:`Grid.components`."""
    rank: int
    node_rank: int
    kind: str | None
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Nodes that look alike."""

    nodes: range
    """Their ranks."""
    num_devices: int
    """Devices of each."""
    first_device: int
    """Global rank of the first node's first device."""
    hardware: tuple[tuple[str, int], ...]
    """Pieces of other hardware of each, by kind."""
    seats: tuple[Seat, ...]
    """By component, then by rank."""
    first_ranks: dict[int, int]
    """Component -> its smallest rank on the first node."""
    rank_steps: dict[int, int]
    """Component -> how much that grows from node to node."""

    def rank(self, seat: Seat, position: int) -> int:
        """Process rank of a seat on the node at ``position`` of :attr:`nodes`."""
        return self.first_ranks[seat.component] + self.rank_steps[seat.component] * position + seat.offset

    def expand(self) -> Iterator[Seated]:
        """Every process on these nodes."""
        for position, node_rank in enumerate(self.nodes):
            for seat in self.seats:
                rank = self.rank(seat, position)
                yield Seated(component=seat.component, rank=rank, node_rank=node_rank, kind=seat.kind, places=seat.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class GridComponent:
    """One component, in a few words."""

    name: str
    role: Role
    num_processes: int
    units_per_process: tuple[int, ...]
    """Different numbers of units that its processes have, ascending."""
    unit: str
    """What a unit is: ``device``, ``Franka``, or ``CPU`` when it has none."""
    devices: tuple[int, ...]
    """Global ranks, ascending."""
    shares_devices_with: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridGroup:
    """One node group."""

    name: str
    num_nodes: int
    num_devices: int
    """Ranks of all its nodes."""
    num_free: int
    """Devices that no process uses."""
    device_resource: str
    folds: tuple[Fold, ...]
    """In the order of their first nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A plan, ready to be drawn."""

    mode: str
    components: tuple[GridComponent, ...]
    groups: tuple[GridGroup, ...]

    def expand(self) -> Iterator[Seated]:
        """Every process of the plan, exactly once, fold by fold."""
        for group in self.groups:
            for fold in group.folds:
                yield from fold.expand()


def grid_of(plan: Plan) -> Grid:
    """The grid of a plan."""
    on_node: list[list[tuple[int, PlannedProcess]]] = [[] for _ in plan.nodes]
    for index, component in enumerate(plan.components):
        for process in component.processes:
            on_node[process.node_rank].append((index, process))
    by_group: dict[str, list[PlannedNode]] = {}
    for node in plan.nodes:
        by_group.setdefault(node.group, []).append(node)
    return Grid(
        mode=plan.mode.value,
        components=_components(plan),
        groups=tuple(_group(name, nodes, on_node) for name, nodes in by_group.items()),
    )


def _components(plan: Plan) -> tuple[GridComponent, ...]:
    components: list[GridComponent] = []
    for component in plan.components:
        seats = [place(process) for process in component.processes]
        kinds = dict.fromkeys(kind for kind, _ in seats if kind is not None)
        components.append(
            GridComponent(
                name=component.name,
                role=component.role,
                num_processes=component.world_size,
                units_per_process=tuple(sorted({len(places) for _, places in seats})),
                unit="/".join(kinds).replace(ACCELERATOR, "device") or "CPU",
                devices=component.devices,
                shares_devices_with=component.shares_devices_with,
            )
        )
    return tuple(components)


def place(process: PlannedProcess) -> tuple[str | None, tuple[int, ...]]:
    """Kind and indexes on the node of what a process uses; None and nothing for a CPU process."""
    if process.local_devices:
        return ACCELERATOR, process.local_devices
    if process.local_hardware:
        return process.hardware_type, process.local_hardware
    return None, ()


def _group(name: str, nodes: Sequence[PlannedNode], on_node: Sequence[Sequence[tuple[int, PlannedProcess]]]) -> GridGroup:
    folder = _Folder()
    num_used = 0
    for node in nodes:
        here = on_node[node.rank]
        num_used += len({device for _, process in here for device in process.devices})
        folder.add(node, here)
    num_devices = sum(node.num_devices for node in nodes)
    return GridGroup(
        name=name,
        num_nodes=len(nodes),
        num_devices=num_devices,
        num_free=num_devices - num_used,
        device_resource=nodes[0].device_resource,
        folds=folder.folds(),
    )


class _Run:
    """A fold that is still growing."""

    def __init__(self, node: PlannedNode, seats: tuple[Seat, ...], firsts: dict[int, int]) -> None:
        self._node = node
        self._seats = seats
        self._first = firsts
        self._last = (node.rank, firsts)
        self._step: tuple[int, dict[int, int]] | None = None
        self._count = 1

    def take(self, node: PlannedNode, firsts: dict[int, int]) -> bool:
        """Whether the node goes on with the progression; if so it is in."""
        last_rank, last_firsts = self._last
        step = (node.rank - last_rank, {component: first - last_firsts[component] for component, first in firsts.items()})
        if self._step is not None and self._step != step:
            return False
        self._step, self._last = step, (node.rank, firsts)
        self._count += 1
        return True

    def fold(self) -> Fold:
        node_step, rank_steps = self._step or (1, dict.fromkeys(self._first, 0))
        start = self._node.rank
        return Fold(
            nodes=range(start, start + node_step * self._count, node_step),
            num_devices=self._node.num_devices,
            first_device=self._node.first_device,
            hardware=self._node.hardware,
            seats=self._seats,
            first_ranks=self._first,
            rank_steps=rank_steps,
        )


class _Folder:
    """Folds the nodes of a group, given by rank."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._open: dict[tuple[int, tuple[tuple[str, int], ...], tuple[Seat, ...]], _Run] = {}

    def add(self, node: PlannedNode, here: Sequence[tuple[int, PlannedProcess]]) -> None:
        """Put the next node into a run that it continues, or start one."""
        firsts: dict[int, int] = {}
        for component, process in here:
            firsts[component] = min(firsts.get(component, process.rank), process.rank)
        seats = []
        for component, process in sorted(here, key=lambda item: (item[0], item[1].rank)):
            kind, places = place(process)
            seats.append(Seat(component=component, offset=process.rank - firsts[component], kind=kind, places=places))
        shape = (node.num_devices, node.hardware, tuple(seats))
        run = self._open.get(shape)
        if run is None or not run.take(node, firsts):
            self._open[shape] = run = _Run(node, shape[2], firsts)
            self._runs.append(run)

    def folds(self) -> tuple[Fold, ...]:
        """All folds, by first node."""
        return tuple(run.fold() for run in self._runs)
