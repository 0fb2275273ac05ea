"""What a job can be placed on: nodes, groups of nodes, and the units that ranks count. Data only, no Kubernetes, no Ray.

::

    Topology.select(labels) -> Selection ── locate(rank) ──> node, index on the node, group

A *unit* is what one resource rank stands for: an accelerator, a piece of other hardware (a robot), or a whole node.
What a group's ranks count is RLinf's rule (RLinf 0.3.0, "placement"): the group's hardware type if it names one, else
accelerators if any of its nodes has one, else nodes. Ranks count through the groups in written order, inside a group through
the nodes by rank, on a node by index; nodes without units are skipped.

Time and memory of a selection grow with its groups and nodes, not with its units.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from rljob_api.errors import PlacementError, did_you_mean, show

ACCELERATOR = "Accelerator"
"""Hardware type of accelerators, whatever their type."""
NO_ACCELERATOR = "NO_ACCEL"
"""Accelerator type of a node without any."""
CLUSTER = "cluster"
"""Reserved group: all nodes; the default."""
NODE = "node"
"""Reserved group: all nodes, whatever hardware they have; its ranks are node ranks."""
RESERVED_GROUPS = (CLUSTER, NODE)
MAX_REMEMBERED = 16
"""Selections that a topology keeps."""
MAX_SEGMENTS = 131_072
"""Nodes that the groups of one selection may have together; only repeated nodes can make them more than a cluster has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine (pod)."""

    rank: int
    """Position in :attr:`Topology.nodes`."""
    num_accelerators: int = 0
    accelerator_type: str = NO_ACCELERATOR
    """Type of its accelerators, for example ``NV_GPU``; the same for all of a node."""
    hardware: Mapping[str, int] = field(default_factory=dict)
    """Pieces of other hardware by type, for example ``{"Franka": 2}``."""
    name: str = ""
    """What users call it, for messages."""

    def __str__(self) -> str:
        """``node 3 (train[1])``."""
        return f"node {self.rank} ({self.name})" if self.name else f"node {self.rank}"

    def num_units(self, hardware_type: str | None) -> int:
        """Units of a hardware type on this node; None counts the node itself."""
        if hardware_type is None:
            return 1
        return self.num_accelerators if hardware_type == ACCELERATOR else self.hardware.get(hardware_type, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes under one label; groups may overlap."""

    label: str
    node_ranks: tuple[int, ...]
    """Ascending, without repetition."""
    hardware_type: str | None
    """What its ranks count; None counts nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The units of one node inside a selection."""

    group: str
    node: Node
    hardware_type: str | None
    first: int
    """Rank, within the selection, of the node's first unit."""
    num_units: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the ranks of one placement count, in rank order."""

    labels: tuple[str, ...]
    segments: tuple[Segment, ...]
    hardware_types: tuple[str, ...]
    """What the selected groups count, in their order, without repetition; empty when nodes are counted."""
    _starts: tuple[int, ...] = field(repr=False)

    @property
    def counts_nodes(self) -> bool:
        """Whether ranks are nodes, not hardware."""
        return not self.hardware_types

    @property
    def num_units(self) -> int:
        """Available ranks are ``0 .. num_units - 1``."""
        return self.segments[-1].first + self.segments[-1].num_units if self.segments else 0

    @property
    def unit_name(self) -> str:
        """What a rank stands for, in words: ``accelerator``, ``Franka``, ``node``."""
        return "/".join(self.hardware_types).replace(ACCELERATOR, "accelerator") if self.hardware_types else "node"

    def locate(self, rank: int) -> Segment:
        """The segment that ``rank``, which must be available, lies in; its index on the node is ``rank - segment.first``."""
        return self.segments[bisect_right(self._starts, rank) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All nodes and groups of a job; :func:`topology` makes it."""

    nodes: tuple[Node, ...]
    """By rank, from 0 without gaps."""
    groups: Mapping[str, NodeGroup]
    """By label, the reserved ones included."""
    _selections: dict[tuple[tuple[str, ...], bool, bool], Selection] = field(default_factory=dict, repr=False, compare=False)
    """Selections made before: components mostly select the same."""

    def select(self, labels: Sequence[str] = (), missing_check: str = "G1", *, together: bool = True) -> Selection:
        """The units of some groups, which count through the groups in this order; no label means the whole cluster.

        Args:
            labels: the groups.
            missing_check: id of the check that a group exists.
            together: check that the groups may be placed on together; without, the selection is for counting only.

        Raises:
            PlacementError: a group is unknown (``missing_check``), two have a node in common (D6, V3), or some count nodes and some
                hardware (D8).
        """
        return self._remembered([self._group(label, missing_check) for label in labels or (CLUSTER,)], together, counts_nodes=False)

    def count_nodes(self, labels: Sequence[str] = (), missing_check: str = "F3") -> Selection:
        """Like :meth:`select`, but ranks are nodes whatever hardware the groups have."""
        groups: list[NodeGroup] = []
        for label in labels or (CLUSTER,):
            if label not in self.groups:
                # RLinf goes group by group.
                _check_combination([replace(group, hardware_type=None) for group in groups])
            groups.append(self._group(label, missing_check))
        return self._remembered([replace(group, hardware_type=None) for group in groups], True, counts_nodes=True)

    def _remembered(self, groups: Sequence[NodeGroup], together: bool, *, counts_nodes: bool) -> Selection:
        key = (tuple(group.label for group in groups), together, counts_nodes)
        selection = self._selections.get(key)
        if selection is None:
            if len(self._selections) >= MAX_REMEMBERED:
                self._selections.clear()
            selection = self._selections[key] = self._selection(groups, together)
        return selection

    def _selection(self, groups: Sequence[NodeGroup], together: bool) -> Selection:
        if together:
            _check_combination(groups)
        if sum(len(group.node_ranks) for group in groups) > max(MAX_SEGMENTS, len(self.nodes)):
            raise PlacementError(
                "D6", f"the groups have more than {MAX_SEGMENTS} nodes together", "name every group once, and fewer groups"
            )
        segments: list[Segment] = []
        first = 0
        for group in groups:
            for rank in group.node_ranks:
                count = self.nodes[rank].num_units(group.hardware_type)
                if count:
                    segments.append(
                        Segment(group=group.label, node=self.nodes[rank], hardware_type=group.hardware_type, first=first, num_units=count)
                    )
                    first += count
        return Selection(
            labels=tuple(group.label for group in groups),
            segments=tuple(segments),
            hardware_types=tuple(dict.fromkeys(group.hardware_type for group in groups if group.hardware_type is not None)),
            _starts=tuple(segment.first for segment in segments),
        )

    def _group(self, label: str, missing_check: str) -> NodeGroup:
        group = self.groups.get(label)
        if group is None:
            own = [known for known in self.groups if known not in RESERVED_GROUPS]
            near = did_you_mean(label, self.groups)
            there = f"there are {', '.join(own)}" if own else "there are none"
            raise PlacementError(missing_check, f"no node group is called {show(label)}, {there}", near or "name an existing group")
        return group


def topology(nodes: Sequence[Node], groups: Iterable[NodeGroup] = ()) -> Topology:
    """Put nodes and groups together and add the reserved groups ``cluster`` and ``node``."""
    everyone = tuple(node.rank for node in nodes)
    reserved = (
        NodeGroup(label=CLUSTER, node_ranks=everyone, hardware_type=default_hardware(nodes)),
        NodeGroup(label=NODE, node_ranks=everyone, hardware_type=None),
    )
    return Topology(nodes=tuple(nodes), groups=MappingProxyType({group.label: group for group in (*reserved, *groups)}))


def default_hardware(nodes: Iterable[Node]) -> str | None:
    """What ranks count on these nodes when nothing else is said: accelerators where any has one, else nodes."""
    return ACCELERATOR if any(node.num_accelerators for node in nodes) else None


def _check_combination(groups: Sequence[NodeGroup]) -> None:
    """Several groups must add up to one row of units, each there once."""
    if len(groups) < 2:
        return
    counting_nodes = [group.label for group in groups if group.hardware_type is None]
    owners: dict[tuple[int, str | None], NodeGroup] = {}
    labels: set[str] = set()
    for group in groups:
        if group.label in labels:
            raise _counted_twice(
                group.node_ranks[0] if group.node_ranks else 0, f"{show(group.label)}, which is named twice", bool(counting_nodes)
            )
        labels.add(group.label)
        for rank in group.node_ranks:
            # Where nodes are counted, a node is one unit whatever hardware another group counts on it.
            other = owners.setdefault((rank, None if counting_nodes else group.hardware_type), group)
            if other is not group:
                raise _counted_twice(rank, f"{show(other.label)} and {show(group.label)}", bool(counting_nodes))
    if counting_nodes and len(counting_nodes) < len(groups):
        others = [group.label for group in groups if group.hardware_type is not None]
        raise PlacementError(
            "D8",
            f"ranks of {', '.join(map(show, counting_nodes))} count nodes, ranks of {', '.join(map(show, others))} count hardware",
            "place on one kind only; to count nodes throughout, name the group node",
        )


def _counted_twice(rank: int, where: str, counts_nodes: bool) -> PlacementError:
    return PlacementError(
        "V3" if counts_nodes else "D6",
        f"node {rank} is in {where}, so its units would be counted twice",
        "name groups that have no node in common, each once",
    )
