"""Which physical units a component's ranks stand for, whatever its node groups: so that components can be compared.

A footprint is kept as ranges of indexes per node and hardware type: time and memory grow with the nodes, not with the units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rljob_api.placement.topology import Selection


@dataclass(frozen=True, slots=True)
class Footprint:
    """A set of units."""

    ranges: dict[tuple[int, str | None], list[range]]
    """Indexes on the node by node rank and hardware type (None: the node itself), ascending and not touching."""

    def overlaps(self, other: Footprint) -> bool:
        """Whether any unit is in both."""
        return any(_meet(ranges, other.ranges.get(place, [])) for place, ranges in self.ranges.items())

    def contains(self, other: Footprint) -> bool:
        """Whether every unit of ``other`` is in this one."""
        return all(_cover(self.ranges.get(place, []), ranges) for place, ranges in other.ranges.items())


def footprint(selection: Selection, parts: Iterable[range]) -> Footprint:
    """The units of some ranks of a selection.

    Args:
        selection: what the ranks count.
        parts: ascending ranges of available ranks, disjoint.
    """
    found: dict[tuple[int, str | None], list[range]] = {}
    for part in parts:
        rank = part.start
        while rank < part.stop:
            segment = selection.locate(rank)
            stop = min(part.stop, segment.first + segment.num_units)
            indexes = range(rank - segment.first, stop - segment.first)
            ranges = found.setdefault((segment.node.rank, segment.hardware_type), [])
            if ranges and ranges[-1].stop == indexes.start:
                ranges[-1] = range(ranges[-1].start, indexes.stop)
            else:
                ranges.append(indexes)
            rank = stop
    return Footprint(found)


def _meet(left: list[range], right: list[range]) -> bool:
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i].start < right[j].stop and right[j].start < left[i].stop:
            return True
        if left[i].stop <= right[j].start:
            i += 1
        else:
            j += 1
    return False


def _cover(outer: list[range], inner: list[range]) -> bool:
    i = 0
    for each in inner:
        while i < len(outer) and outer[i].stop < each.stop:
            i += 1
        if i == len(outer) or outer[i].start > each.start:
            return False
    return True
