"""From resource ranks within a selection to the node and units of every process: the one way a process gets its place.

Order: processes are numbered by node, then by first unit, or as given. Groups may be written in any order; ranks count in that order.
Every rank is resolved on its own, so that no process gets a device that its node does not have, whatever the nodes' sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rljob_api.errors import PlacementError, show
from rljob_api.placement.topology import Node, Segment, Selection

MAX_PROCESSES = 262_144
"""Processes one component may have: bounds memory, far above any real job."""
MAX_UNITS = 1_000_000
"""Units that all processes of a component may have together."""


Seat = tuple[int, Segment, tuple[int, ...]]
"""One process: its rank, what its first unit lies in, and its resource ranks ascending. Plain, as jobs have up to 10^5 of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """The processes of one component on one node."""

    node: Node
    index: int
    """Index of the node among those that the component uses."""
    seats: Sequence[Seat]
    """At least one, by rank."""


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


def strided(start: int, end: int, size: int, stride: int) -> list[range]:
    """Resource ranks of equal processes that fill a range, close or interleaved: 0-7 by 2 with stride 4 gives 0,4 1,5 2,6 3,7.

    Args:
        start: first rank.
        end: last rank, included.
        size: ranks of one process.
        stride: distance between the ranks of one process; without meaning where it has one.
    """
    per_block = stride if size > 1 else 1
    """Interleaved processes, which cover ``size * per_block`` ranks together."""
    return [
        range(block + k, block + k + (size - 1) * stride + 1, stride)
        for block in range(start, end + 1, size * per_block)
        for k in range(per_block)
    ]


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


def shifted(units: tuple[int, ...], offset: int) -> tuple[int, ...]:
    """Every unit plus ``offset``."""
    return (units[0] + offset,) if len(units) == 1 else tuple([unit + offset for unit in units])


def available_ranks(count: int) -> str:
    """``the 8 available ranks are 0-7``; at least one is."""
    return "the 1 available rank is 0" if count == 1 else f"the {count} available ranks are 0-{count - 1}"
