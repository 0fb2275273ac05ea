"""RLinf's placement strategies: from ranks within a selection to the placement of every process.

::

    NodePlacementStrategy ──────┐
    PackedPlacementStrategy ────┼──> resource ranks of every process ── rljob_api.placement.assignment ──> Placement per process
    FlexiblePlacementStrategy ──┘

Names, arguments and rules are RLinf 0.3.0's ("Placement Strategies"), without its defects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from rljob_api.errors import PlacementError, show
from rljob_api.placement.assignment import NodeShare, Seat, check_amount, shares, shifted, strided
from rljob_api.placement.topology import ACCELERATOR, Selection, Topology
from rljob_convert.placement.metadata import Placement


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
        return strided(self.start_hardware_rank, self.end_hardware_rank, self.num_hardware_per_process, self.stride)


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
