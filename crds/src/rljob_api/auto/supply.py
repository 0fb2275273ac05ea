"""Free devices of node groups, taken from the front in chunks that never cross a node.

A chunk is what must stay on one node: an engine's devices, a tensor parallel group, or a single device. A question about
a group costs O(log nodes), whatever its number of devices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple


class Cursor(NamedTuple):
    """How far a group is taken: all free devices of earlier nodes, and ``used`` of this one."""

    node: int
    used: int


START = Cursor(0, 0)


class FreeGroup:
    """The free devices of one node group; immutable to its users."""

    def __init__(
        self,
        *,
        index: int,
        name: str,
        first_node: int,
        nodes: int,
        devices_per_node: int,
        resource: str,
        taken: Mapping[int, frozenset[int]],
    ) -> None:
        """Describe a group.

        Args:
            index: in ``spec.nodeGroups``.
            name: of the group.
            first_node: rank of its first node in the job.
            nodes: number of nodes.
            devices_per_node: devices of each.
            resource: what its devices are.
            taken: devices that others hold, as indexes on the node, by index of the node; nodes without any are left out.
        """
        self.index = index
        self.name = name
        self.first_node = first_node
        self.devices_per_node = devices_per_node
        self.resource = resource
        self._taken = taken
        self._free = [devices_per_node - len(taken.get(node, ())) for node in range(nodes)]
        self._sums: dict[int, list[int]] = {}

    @property
    def num_devices(self) -> int:
        """All its devices, free or not."""
        return len(self._free) * self.devices_per_node

    @property
    def num_free(self) -> int:
        """Its free devices."""
        return sum(self._free)

    @property
    def largest_node(self) -> int:
        """Free devices of the node that has most."""
        return max(self._free, default=0)

    def capacity(self, at: Cursor, chunk: int) -> int:
        """Chunks that are free from ``at`` on."""
        sums = self._chunks(chunk)
        return self._rest(at, chunk) + sums[-1] - sums[min(at.node + 1, len(self._free))]

    def room_on_node(self, at: Cursor, chunk: int) -> int:
        """Chunks that are free on the node of ``at``."""
        return self._rest(at, chunk)

    def after(self, at: Cursor, chunk: int, count: int) -> Cursor:
        """Where ``count`` chunks from ``at`` on end; they must be free."""
        here = self._rest(at, chunk)
        if count <= here:
            return Cursor(at.node, at.used + count * chunk)
        sums = self._chunks(chunk)
        wanted = sums[at.node + 1] + count - here
        node = bisect_left(sums, wanted) - 1
        return Cursor(node, (wanted - sums[node]) * chunk)

    def runs(self, at: Cursor, chunk: int, count: int) -> Iterator[tuple[int, int]]:
        """First and last rank within the group of each run of devices in ``count`` chunks from ``at`` on."""
        node, used = at
        while count:
            fitting = min((self._free[node] - used) // chunk, count)
            yield from self._runs_on_node(node, used, used + fitting * chunk)
            count -= fitting
            node, used = node + 1, 0

    def _runs_on_node(self, node: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Runs of the free devices ``start`` to ``stop - 1`` of a node."""
        first = node * self.devices_per_node
        taken = self._taken.get(node)
        if stop > start and taken is None:
            yield first + start, first + stop - 1
        elif stop > start:
            free = [index for index in range(self.devices_per_node) if index not in (taken or ())]
            yield from merged((first + index, first + index) for index in free[start:stop])

    def _rest(self, at: Cursor, chunk: int) -> int:
        return (self._free[at.node] - at.used) // chunk if at.node < len(self._free) else 0

    def _chunks(self, chunk: int) -> list[int]:
        """Chunks before each node, and in all."""
        if chunk not in self._sums:
            self._sums[chunk] = list(accumulate((free // chunk for free in self._free), initial=0))
        return self._sums[chunk]


def merged(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Ascending runs with neighbors joined."""
    last: tuple[int, int] | None = None
    for start, end in runs:
        if last is not None and start == last[1] + 1:
            last = (last[0], end)
            continue
        if last is not None:
            yield last
        last = (start, end)
    if last is not None:
        yield last


@dataclass(frozen=True, slots=True)
class Share:
    """What one component takes of one group."""

    group: FreeGroup
    start: Cursor
    chunk: int
    count: int
    """Chunks, at least one."""

    @property
    def num_devices(self) -> int:
        """Devices of all chunks."""
        return self.chunk * self.count

    @property
    def nodes(self) -> tuple[int, int]:
        """Job ranks of its first and last node."""
        first, last = self.group.after(self.start, self.chunk, 1).node, self.group.after(self.start, self.chunk, self.count).node
        return self.group.first_node + first, self.group.first_node + last


Shares = tuple[Share, ...]
"""All that one component takes."""
Cursors = Mapping[int, Cursor]
"""How far each group is taken, by index; groups that nobody touched are left out."""


def take(cursors: Cursors, groups: Sequence[FreeGroup], chunk: int, count: int) -> tuple[Shares, Cursors] | None:
    """``count`` chunks of these groups, in this order, and what is taken then; None when there are not as many."""
    after = dict(cursors)
    shares: list[Share] = []
    for group in groups:
        if not count:
            break
        at = after.get(group.index, START)
        here = min(group.capacity(at, chunk), count)
        if here:
            shares.append(Share(group, at, chunk, here))
            after[group.index] = group.after(at, chunk, here)
            count -= here
    return None if count else (tuple(shares), after)


def available(cursors: Cursors, groups: Sequence[FreeGroup], chunk: int) -> int:
    """Chunks that are still free in these groups."""
    return sum(group.capacity(cursors.get(group.index, START), chunk) for group in groups)


def node_span(shares: Shares) -> frozenset[int]:
    """First and last nodes: one element exactly when all is on one node."""
    return frozenset(node for share in shares for node in share.nodes)


def rank_text(shares: Shares) -> tuple[tuple[str, ...], str]:
    """Node groups, in the order of the spec, and the ranks that count through them, in RLinf's grammar."""
    runs: list[tuple[int, int]] = []
    offset = 0
    ordered = sorted(shares, key=lambda share: share.group.index)
    for share in ordered:
        runs += [(offset + start, offset + end) for start, end in share.group.runs(share.start, share.chunk, share.count)]
        offset += share.group.num_devices
    text = ",".join(str(start) if start == end else f"{start}-{end}" for start, end in merged(runs))
    return tuple(share.group.name for share in ordered), text
