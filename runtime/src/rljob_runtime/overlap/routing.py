"""Which engine gets which request. Pure decisions over loads; O((requests + engines) log engines).

Rule: the engine that has the request's prefix cached, unless another one has clearly less to do; then the least loaded one. Without
that break all samples of a long prompt would queue at one engine while others idle.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AFFINITY_MARGIN = 2
"""By how many requests a home engine may be ahead of the least loaded one and still be chosen."""
UNEVEN = 1.5
"""Requests move to new engines only from those that have so many times their even share: moving costs a prefill."""


@dataclass(slots=True, eq=False)
class Mates:
    """Where the samples of one prompt are that shall stay together; all of them hold the same object."""

    home: int | None = None
    """The engine first chosen for one of them."""
    at_home: int = 0
    """How many of them it has."""


def route(
    homes: Sequence[int | None],
    loads: Mapping[int, int],
    limit: int,
    margin: int = AFFINITY_MARGIN,
    mates: Sequence[Mates] = (),
) -> list[int | None]:
    """Engines for waiting requests, in their order.

    Args:
        homes: per request the engine that may have its prefix cached; None: no engine has.
        loads: requests that each engine has; only these engines are chosen.
        limit: requests an engine may have.
        margin: see ``AFFINITY_MARGIN``; 0 follows the load alone.
        mates: per request the others of its prompt, whose home is its own as long as it has none (not changed here); their number does
            not count against their home, which so gets all of a group, whatever its size, as long as nothing else loads it. Empty:
            each request by itself.

    Returns:
        Per request an engine, or None where all are full.
    """
    now = dict(loads)
    heap = [(load, engine) for engine, load in now.items()]
    heapq.heapify(heap)
    chosen: list[int | None] = []
    settled: dict[Mates, Mates] = {}
    for number, home in enumerate(homes):
        while heap and heap[0][0] != now[heap[0][1]]:  # outdated by a choice of a home engine
            heapq.heapreplace(heap, (now[heap[0][1]], heap[0][1]))
        if not heap or heap[0][0] >= limit:
            chosen.append(None)
            continue
        least, engine = heap[0]
        group = settled.setdefault(mates[number], _open_place(mates[number], now)) if mates else None
        wanted, own = home, 0
        if group is not None and home in (None, group.home):
            wanted, own = group.home, group.at_home
        if (margin or group) and wanted is not None and wanted in now and now[wanted] - own <= least + margin and now[wanted] < limit:
            engine = wanted
        now[engine] += 1
        chosen.append(engine)
        if group is not None:
            settle(group, engine)
    return chosen


def settle(group: Mates, engine: int) -> None:
    """One of the group goes to ``engine``, which becomes their home if they have none."""
    if group.home is None:
        group.home, group.at_home = engine, 0
    group.at_home += group.home == engine


def _open_place(group: Mates, loads: Mapping[int, int]) -> Mates:
    """A copy, without a home that can be given nothing."""
    return Mates(group.home, group.at_home) if group.home in loads else Mates()


def places(waiting: int, loads: Mapping[int, int], slots: int, queued: int) -> tuple[int, int]:
    """How many waiting requests engines are given: within their slots, and beyond.

    What an engine has queued keeps its slots busy while the next request is on its way, but is bound to it: at the end of a batch it
    would wait there while slots of others are free. So places beyond the slots are given only while so many requests wait that every
    engine's queue can be filled once more; the last ``queued * engines`` requests go to free slots alone, wherever one ends first.

    Args:
        waiting: requests without an engine.
        loads: requests that each engine has.
        slots: requests that an engine computes at the same time.
        queued: further ones it may have.
    """
    free = sum(max(slots - load, 0) for load in loads.values())
    within = min(waiting, free)
    room = sum(max(slots + queued - max(load, slots), 0) for load in loads.values())
    return within, min(max(waiting - free - queued * len(loads), 0), room)


def surplus(loads: Mapping[int, int], waiting: int) -> dict[int, int]:
    """Requests that overloaded engines should give away after others joined; empty where the difference does not pay.

    Args:
        loads: requests that each engine has.
        waiting: requests that have no engine yet; they will go to the least loaded ones.
    """
    if not loads:
        return {}
    even = -(-(sum(loads.values()) + waiting) // len(loads))
    return {engine: load - even for engine, load in loads.items() if load > UNEVEN * even}
