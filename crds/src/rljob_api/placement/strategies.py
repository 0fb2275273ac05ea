"""Placement strategies: from ranks within a selection to the place of every process. The one way a process gets its place.

::

    NodePlacementStrategy ──────┐
    PackedPlacementStrategy ────┼──> resource ranks of every process ──> place(selection, ..) -> Placement per process
    FlexiblePlacementStrategy ──┘
    both grammars (planner) ────┘

Names, arguments and rules are RLinf 0.3.0's ("Placement Strategies"), without its defects: every rank is resolved on its own,
so that no process gets a device that its node does not have, whatever the nodes' sizes.

Order: processes are numbered by node, then by first unit. Groups may be written in any order; ranks count in that order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Protocol

from rljob_api.errors import PlacementError, show
from rljob_api.placement.metadata import Placement
from rljob_api.placement.topology import ACCELERATOR, Node, Segment, Selection, Topology

MAX_PROCESSES = 262_144
"""Processes one component may have: bounds memory, far above any real job."""
MAX_UNITS = 1_000_000
"""Units that all processes of a component may have together."""


class PlacementStrategy(Protocol):
    """Anything that places the processes of one component."""

    def get_placement(self, topology: Topology, isolate_accelerator: bool = True) -> tuple[Placement, ...]:
        """One placement per process, by rank.

        Raises:
            PlacementError: it does not fit on ``topology``.
        """


@dataclass(frozen=True, slots=True)
class FlexiblePlacementStrategy:
    """Gives the resource ranks of every process, in any order; processes are then numbered by their first unit."""

    hardware_ranks_list: Sequence[Sequence[int]]
    node_group_label: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check what needs no topology.

        Raises:
            PlacementError: no process, or one without units (F1), or a negative rank (F2).
        """
        if not self.hardware_ranks_list or not all(self.hardware_ranks_list):
            raise PlacementError("F1", "a process without hardware ranks", "give every process at least one rank")
        lowest = min(min(ranks) for ranks in self.hardware_ranks_list)
        if lowest < 0:
            raise PlacementError("F2", f"hardware rank {lowest} is negative", "ranks count from 0")

    def get_placement(self, topology: Topology, isolate_accelerator: bool = True) -> tuple[Placement, ...]:
        """See the protocol.

        Raises:
            PlacementError: F3 to F8.
        """
        selection = _hardware(topology, self.node_group_label, "F3", "F4")
        placements = place(selection, self.hardware_ranks_list, isolate_accelerator=isolate_accelerator)
        _check_groups(topology, selection, "D8")
        return placements


@dataclass(frozen=True, slots=True)
class PackedPlacementStrategy:
    """Fills a range of ranks with equal processes, close or strided: 0-7 by 2 with stride 4 gives 0,4 1,5 2,6 3,7."""

    start_hardware_rank: int
    end_hardware_rank: int
    num_hardware_per_process: int = 1
    stride: int = 1
    node_group: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check what needs no topology.

        Raises:
            PlacementError: the range (B1), or sizes that do not divide it (B2).
        """
        start, end, size, stride = self.start_hardware_rank, self.end_hardware_rank, self.num_hardware_per_process, self.stride
        if start < 0 or end < start:
            raise PlacementError("B1", f"hardware ranks {start} to {end} are no range", "give start and end with 0 <= start <= end")
        if size < 1 or stride < 1:
            raise PlacementError("B2", f"{size} units a process with stride {stride}", "give at least 1 for both")
        if (end - start + 1) % (size * stride):
            raise PlacementError(
                "B2",
                f"{end - start + 1} units cannot be cut into processes of {size} with stride {stride}: not a multiple of {size * stride}",
                "change the range, the units a process has, or the stride",
            )

    def get_placement(self, topology: Topology, isolate_accelerator: bool = True) -> tuple[Placement, ...]:
        """See the protocol.

        Raises:
            PlacementError: B3 to B5.
        """
        selection = _hardware(topology, self.node_group, "B3", "B3")
        if self.end_hardware_rank >= selection.num_units:
            raise PlacementError(
                "B4",
                f"hardware ranks {self.start_hardware_rank} to {self.end_hardware_rank} reach beyond the {selection.num_units} available",
                "use existing ranks",
            )
        num_units = self.end_hardware_rank - self.start_hardware_rank + 1
        check_amount(num_units // self.num_hardware_per_process, num_units)
        placements = place(selection, self.ranks(), isolate_accelerator=isolate_accelerator, split_check="B5")
        _check_groups(topology, selection, "B3")
        return placements

    def ranks(self) -> list[range]:
        """Resource ranks of every process."""
        size, stride = self.num_hardware_per_process, self.stride
        step = size * (stride if size > 1 else 1)
        """Ranks that ``stride`` interleaved processes cover together; a stride has no meaning for single units."""
        per_block = stride if size > 1 else 1
        return [
            range(block + k, block + k + (size - 1) * stride + 1, stride)
            for block in range(self.start_hardware_rank, self.end_hardware_rank + 1, step)
            for k in range(per_block)
        ]


@dataclass(frozen=True, slots=True)
class NodePlacementStrategy:
    """Gives the node of every process; for CPU-only processes."""

    node_ranks: Sequence[int]
    node_group_label: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        """Check what needs no topology.

        Raises:
            PlacementError: no process (V1).
        """
        if not self.node_ranks:
            raise PlacementError("V1", "no node rank is given", "give one per process")

    def get_placement(self, topology: Topology, isolate_accelerator: bool = True) -> tuple[Placement, ...]:
        """See the protocol.

        Raises:
            PlacementError: V2, V3.
        """
        selection = topology.count_nodes(labels_of(self.node_group_label), "F3")
        return place(selection, [(rank,) for rank in self.node_ranks], isolate_accelerator=isolate_accelerator, range_check="V2")


Seat = tuple[int, Segment, tuple[int, ...]]
"""One process: its rank, what its first unit lies in, and its resource ranks ascending. Plain, as jobs have up to 10^5 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """The processes of one component on one node."""

    node: Node
    index: int
    """Of the node among those that the component uses."""
    seats: Sequence[Seat]
    """At least one, by rank."""


def place(
    selection: Selection,
    processes: Sequence[Sequence[int]],
    *,
    isolate_accelerator: bool = True,
    range_check: str = "F5",
    split_check: str = "F6",
) -> tuple[Placement, ...]:
    """Resolve the resource ranks of every process to a node and units on it, and number the processes by node and first unit.

    Args:
        selection: what the ranks count.
        processes: ranks of every process, each with at least one.
        isolate_accelerator: hide accelerators that a process does not own.
        range_check: id of the check that a rank exists.
        split_check: id of the check that a process is on one node.

    Raises:
        PlacementError: as :func:`shares`.
    """
    return tuple(
        _placement(share, local_rank, seat, isolate_accelerator)
        for share in shares(selection, processes, range_check=range_check, split_check=split_check)
        for local_rank, seat in enumerate(share.seats)
    )


def shares(
    selection: Selection,
    processes: Sequence[Sequence[int]],
    *,
    keep_order: bool = False,
    range_check: str = "F5",
    split_check: str = "F6",
) -> Iterator[NodeShare]:
    """What every node has of a component, by node rank. O(units).

    Args:
        selection: what the ranks count.
        processes: ranks of every process, each with at least one.
        keep_order: number the processes as given instead of by node and first unit.
        range_check: id of the check that a rank exists.
        split_check: id of the check that a process is on one node.

    Raises:
        PlacementError: a rank does not exist, a process lies on two nodes, holds a unit twice (F7) or units of two kinds (F8),
            or there are more than :data:`MAX_PROCESSES` processes.
    """
    check_amount(len(processes), sum(map(len, processes)))
    segments: list[Segment] = []
    units: list[tuple[int, ...]] = []
    keys: list[int] = []
    """Whatever puts the processes in order of node, then of first unit or as given. Plain numbers: the collector skips them."""
    start = end = node_key = 0
    for ranks in processes:
        if len(ranks) == 1 and start <= ranks[0] < end:  # on the node of the one before, as most are
            own = tuple(ranks)
        else:
            segment, own = _locate(selection, ranks, range_check, split_check)
            start, end = segment.first, segment.first + segment.num_units
            node_key = segment.node.rank * selection.num_units
        segments.append(segment)
        units.append(own)
        keys.append(node_key if keep_order else node_key + own[0])
    num_before = 0
    by_node = groupby(sorted(range(len(keys)), key=keys.__getitem__), key=lambda position: segments[position].node.rank)
    for index, (_, positions) in enumerate(by_node):
        seats = [
            (position if keep_order else number, segments[position], units[position])
            for number, position in enumerate(positions, num_before)
        ]
        num_before += len(seats)
        yield NodeShare(node=seats[0][1].node, index=index, seats=seats)


def check_amount(num_processes: int, num_units: int, unit_name: str = "hardware") -> None:
    """Check the size of a component's placement before it is made.

    Raises:
        PlacementError: more than :data:`MAX_PROCESSES` processes, or more than :data:`MAX_UNITS` units (S2).
    """
    for count, most, what in ((num_processes, MAX_PROCESSES, "processes"), (num_units, MAX_UNITS, f"{unit_name} ranks")):
        if count > most:
            raise PlacementError("S2", f"{count} {what}, more than {most}", "use fewer")


def labels_of(group: str | Sequence[str] | None) -> tuple[str, ...]:
    """Group labels of a strategy's argument: None, one label, labels with commas, or a list of labels."""
    if group is None:
        return ()
    parts = group.split(",") if isinstance(group, str) else group
    return tuple(part.strip() for part in parts if part.strip())


def _hardware(topology: Topology, group: str | Sequence[str] | None, missing_check: str, empty_check: str) -> Selection:
    """A selection that counts hardware, and has some; :func:`_check_groups` checks the rest."""
    labels = labels_of(group)
    counted = topology.select(labels, missing_check, together=False)
    if counted.counts_nodes or not counted.num_units:
        raise PlacementError(
            empty_check,
            f"{', '.join(map(show, counted.labels))} has no accelerators or other hardware",
            "choose a group with hardware, or place on nodes",
        )
    return counted


def _check_groups(topology: Topology, selection: Selection, mixed_check: str) -> None:
    """Refuse groups without hardware among others, and with a unit in common (D6); last, as RLinf reports other problems first."""
    without = next((segment.group for segment in selection.segments if segment.hardware_type is None), None)
    if without is not None:
        raise PlacementError(mixed_check, f"{show(without)} has no hardware, other groups have some", "place on groups with hardware only")
    if len(selection.labels) > 1:
        topology.select(selection.labels)


def _locate(selection: Selection, ranks: Sequence[int], range_check: str, split_check: str) -> tuple[Segment, tuple[int, ...]]:
    """The one node of a process and its ranks, ascending."""
    units = tuple(sorted(ranks)) if len(ranks) > 1 else tuple(ranks)
    first, last = units[0], units[-1]
    if first < 0 or last >= selection.num_units:
        wrong = first if first < 0 else last
        raise PlacementError(
            range_check,
            f"{selection.unit_name} rank {wrong} does not exist, available are {available(selection)}",
            "use existing ranks, or ask for more nodes",
        )
    segment = selection.locate(first)
    if last >= segment.first + segment.num_units:
        other = selection.locate(last)
        if other.node.rank == segment.node.rank and other.hardware_type == segment.hardware_type:
            raise PlacementError(
                "D6",
                f"ranks {_listed(units)} of one process are in {show(segment.group)} and {show(other.group)}, which count the same units",
                "name groups that have no node in common, each once",
            )
        if other.node.rank == segment.node.rank:
            raise PlacementError(
                "F8" if split_check == "F6" else split_check,
                f"a process holds {segment.hardware_type} and {other.hardware_type}, two kinds of hardware",
                "give every process units of one kind",
            )
        raise PlacementError(
            split_check,
            f"puts {selection.unit_name} ranks {_listed(units)}, which one process has, on two nodes: {segment.node} and {other.node}",
            "align the units of a process with a node",
        )
    if len(set(units)) < len(units):
        twice = next(rank for rank, count in Counter(units).items() if count > 1)
        raise PlacementError("F7", f"a process holds {selection.unit_name} {twice} twice", "list every rank of a process once")
    return segment, units


def available(selection: Selection) -> str:
    """Available ranks in words: ``0-7``, or ``none``."""
    return f"0-{selection.num_units - 1}" if selection.num_units > 1 else ("0" if selection.num_units else "none")


def _listed(units: Sequence[int]) -> str:
    return ", ".join(map(str, units[:8])) + (", .." if len(units) > 8 else "")


@lru_cache(maxsize=64)
def _all_names(num_accelerators: int) -> tuple[str, ...]:
    """Accelerators of a node; the processes that see all of them share one tuple."""
    return tuple(map(str, range(num_accelerators)))


def _placement(share: NodeShare, local_rank: int, seat: Seat, isolate: bool) -> Placement:
    node = share.node
    rank, segment, units = seat
    indexes = shifted(units, -segment.first) if segment.hardware_type is not None else ()
    own = indexes if segment.hardware_type == ACCELERATOR else ()
    return Placement(
        rank=rank,
        cluster_node_rank=node.rank,
        placement_node_rank=share.index,
        local_accelerator_rank=own[0] if own else -1,
        accelerator_type=node.accelerator_type,
        local_rank=local_rank,
        local_world_size=len(share.seats),
        visible_accelerators=tuple(map(str, own)) if isolate else _all_names(node.num_accelerators),
        isolate_accelerator=isolate,
        local_hardware_ranks=indexes,
        node_group_label=segment.group,
        hardware_type=segment.hardware_type,
        units=units,
    )


def shifted(units: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """Every unit plus ``offset``."""
    return (units[0] + offset,) if len(units) == 1 else tuple([unit + offset for unit in units])
