"""Sync routes for a picture: bundled until a person can read them. Time grows with processes + routes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rljob_api.planning.sync_routes import SyncPlan, Transport
from rljob_runtime.plan_view.grid import Grid
from rljob_runtime.plan_view.words import count, ranges, short_ranges

MAX_ENDS = 8
"""Boxes on each side of the picture."""
_WHERE_CHARS = 14
TRANSPORT_WORDS = {
    Transport.SAME_DEVICE: "same device",
    Transport.SAME_NODE: "same node",
    Transport.NETWORK: "network",
    Transport.NODE_COPY: "copy on the node",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Weights that one process sends to another."""

    source: tuple[str, int]
    """Component and process rank."""
    target: tuple[str, int]
    """Component and process rank."""
    transport: Transport
    num_pieces: int = 1
    """Pieces of the weights that travel so."""


def routes_of(sync: SyncPlan, trainer: str, rollout: str) -> tuple[Route, ...]:
    """The routes of a sync plan between two components, by engine."""
    pieces = Counter((route.source_rank, route.engine, route.transport) for route in sync.routes())
    return tuple(
        Route(source=(trainer, rank), target=(rollout, engine), transport=transport, num_pieces=number)
        for (rank, engine, transport), number in pieces.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One box: some processes of a component."""

    component: int
    """Index into :attr:`Grid.components`."""
    ranks: tuple[int, ...]
    """Ascending."""
    where: str
    """For example ``node 0: 0,1``, ``node 3``, ``16 nodes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """Routes between two boxes that travel alike."""

    source: int
    """Index into :attr:`Flow.sources`."""
    target: int
    """Index into :attr:`Flow.targets`."""
    transport: Transport
    num_routes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """All routes, bundled."""

    sources: tuple[End, ...]
    targets: tuple[End, ...]
    arrows: tuple[Arrow, ...]

    def totals_of(self, target: int | None = None) -> tuple[tuple[Transport, int], ...]:
        """Routes by transport, nearest first, those that occur; all, or those to one box."""
        counted: Counter[Transport] = Counter()
        for arrow in self.arrows:
            if target is None or arrow.target == target:
                counted[arrow.transport] += arrow.num_routes
        return tuple((transport, counted[transport]) for transport in Transport if counted[transport])


_Process = tuple[int, int]
"""Index of its component, and its rank."""
_Key = tuple[int, ...]
"""What processes are bundled by."""
_Spots = dict[_Process, tuple[int, tuple[int, ...]]]
"""Process -> node rank and indexes on the node."""


def flow(grid: Grid, routes: Sequence[Route], max_sources: int = MAX_ENDS) -> Flow:
    """Bundle a side by process if it then has few enough boxes, else by node, else by component."""
    index = {component.name: position for position, component in enumerate(grid.components)}
    spots = {(seated.component, seated.rank): (seated.node_rank, seated.places) for seated in grid.expand()}
    senders = [(index[route.source[0]], route.source[1]) for route in routes]
    receivers = [(index[route.target[0]], route.target[1]) for route in routes]
    sources, source_of = _boxes(senders, spots, max_sources)
    targets, target_of = _boxes(receivers, spots, MAX_ENDS)
    bundles: Counter[tuple[int, int, Transport]] = Counter()
    for sender, receiver, route in zip(senders, receivers, routes, strict=True):
        bundles[source_of[sender], target_of[receiver], route.transport] += route.num_pieces
    arrows = [Arrow(source=s, target=t, transport=transport, num_routes=number) for (s, t, transport), number in bundles.items()]
    order = list(Transport)
    return Flow(
        sources=sources,
        targets=targets,
        arrows=tuple(sorted(arrows, key=lambda arrow: (arrow.target, arrow.source, order.index(arrow.transport)))),
    )


def sentences(grid: Grid, routes: Sequence[Route]) -> tuple[str, tuple[str, ...]]:
    """The routes in words: their totals, and one line per receiving box."""
    bundled = flow(grid, routes, max_sources=len(routes))
    lines = []
    for position, target in enumerate(bundled.targets):
        senders: dict[int, set[int]] = {}
        for arrow in bundled.arrows:
            if arrow.target == position:
                source = bundled.sources[arrow.source]
                senders.setdefault(source.component, set()).update(source.ranks)
        who = ", ".join(f"{grid.components[component].name} {short_ranges(ranks, 24)}" for component, ranks in senders.items())
        line = f"{who} → {grid.components[target.component].name} {short_ranges(target.ranks, 24)} ({target.where})"
        share = bundled.totals_of(position)
        lines.append(line if len(bundled.targets) == 1 else f"{line}: {_by_transport(share)}")
    return _by_transport(bundled.totals_of()), tuple(lines)


def _by_transport(totals: Sequence[tuple[Transport, int]]) -> str:
    """``4 routes, same node``, or ``4 routes: 3 same node, 1 network``."""
    total = count(sum(number for _, number in totals), "route")
    if len(totals) == 1:
        return f"{total}, {TRANSPORT_WORDS[totals[0][0]]}"
    return f"{total}: " + ", ".join(f"{number:,} {TRANSPORT_WORDS[transport]}" for transport, number in totals)


def _boxes(processes: Iterable[_Process], spots: _Spots, max_ends: int) -> tuple[tuple[End, ...], dict[_Process, int]]:
    """Boxes in order of component and first rank, and the box of every process."""
    levels: tuple[Callable[[_Process], _Key], ...] = (
        lambda process: process,
        lambda process: (process[0], spots[process][0]),
        lambda process: (process[0],),
    )
    ordered = sorted(set(processes))
    members: dict[_Key, list[_Process]] = {}
    for level in levels:
        members = {}
        for process in ordered:
            members.setdefault(level(process), []).append(process)
        if len(members) <= max_ends:
            break
    boxes = tuple(
        End(component=inside[0][0], ranks=tuple(rank for _, rank in inside), where=_where([spots[process] for process in inside]))
        for inside in members.values()
    )
    return boxes, {process: position for position, inside in enumerate(members.values()) for process in inside}


def _where(spots: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    nodes = ranges(sorted({node for node, _ in spots}))
    if not nodes.isdecimal():
        return f"nodes {nodes}" if len(nodes) <= _WHERE_CHARS else count(len({node for node, _ in spots}), "node")
    places = {place for _, where in spots for place in where}
    return f"node {nodes}: {short_ranges(places, _WHERE_CHARS)}" if places else f"node {nodes}"
