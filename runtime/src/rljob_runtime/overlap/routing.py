"""Which engine gets which request. Pure decisions over loads; O((requests + engines) log engines).

Rule: the engine that has the request's prefix cached, unless another one has clearly less to do; then the one with the least load for its
capacity. Without that limit all samples of a long prompt would queue at one engine while others idle.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

AFFINITY_MARGIN = 2
"""By how many requests the engine with the cached prefix may be ahead of the least loaded one and still be chosen."""
UNEVEN = 1.5
"""Requests move to engines that join only from those that have this many times their even share: moving costs a prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many requests an engine takes."""

    slots: int
    """Requests it computes at the same time, at least 1."""
    queued: int = 0
    """Further ones it may hold so that no slot idles between two."""


@dataclass(slots=True, eq=False)
class GroupAffinity:
    """Where the samples of one prompt are that should stay together; all of them hold the same object."""

    engine: int | None = None
    """The engine first chosen for one of them."""
    num_there: int = 0
    """How many of them it has."""


def route(
    preferred: Sequence[int | None],
    loads: Mapping[int, int],
    limits: Mapping[int, int],
    margin: int = AFFINITY_MARGIN,
    affinity: Sequence[GroupAffinity] = (),
) -> list[int | None]:
    """Engines for waiting requests, in their order.

    Args:
        preferred: per request the engine that may have its prefix cached; None: no engine has.
        loads: requests that each engine has; only these engines are chosen.
        limits: requests that each engine may have; loads are compared relative to them.
        margin: see ``AFFINITY_MARGIN``; 0 follows the load alone.
        affinity: per request where its group is; a request without a preferred engine prefers its group's (not changed here). Those of a
            group do not count against its engine, so that it gets all of the group, whatever its size, as long as nothing else loads it.
            Empty: each request by itself.

    Returns:
        Per request an engine, or None where all are full.
    """
    now = dict(loads)
    heap = [(_share(load, limits[engine]), engine) for engine, load in now.items()]
    heapq.heapify(heap)
    chosen: list[int | None] = []
    settled: dict[GroupAffinity, GroupAffinity] = {}
    for number, first in enumerate(preferred):
        while heap and heap[0][0] != (current := _share(now[heap[0][1]], limits[heap[0][1]])):  # outdated by a choice of a preferred engine
            heapq.heapreplace(heap, (current, heap[0][1]))
        if not heap or now[heap[0][1]] >= limits[heap[0][1]]:
            chosen.append(None)
            continue
        engine = heap[0][1]
        group = settled.setdefault(affinity[number], _usable(affinity[number], now)) if affinity else None
        wanted, own = first, 0
        if group is not None and first in (None, group.engine):
            wanted, own = group.engine, group.num_there
        if (margin or group) and wanted is not None and wanted in now and now[wanted] < limits[wanted]:
            ahead = now[wanted] - own - margin
            if ahead * limits[engine] <= now[engine] * limits[wanted]:
                engine = wanted
        now[engine] += 1
        chosen.append(engine)
        if group is not None:
            settle(group, engine)
    return chosen


def _share(load: int, limit: int) -> float:
    """Load relative to the limit; an engine that takes nothing is full."""
    return load / limit if limit else float("inf")


def settle(group: GroupAffinity, engine: int) -> None:
    """One of the group goes to ``engine``, which becomes the group's engine if it has none."""
    if group.engine is None:
        group.engine, group.num_there = engine, 0
    group.num_there += group.engine == engine


def _usable(group: GroupAffinity, loads: Mapping[int, int]) -> GroupAffinity:
    """A copy, without an engine that can be given nothing."""
    return GroupAffinity(group.engine, group.num_there) if group.engine in loads else GroupAffinity()


def places(waiting: int, loads: Mapping[int, int], capacities: Mapping[int, Capacity]) -> tuple[int, int]:
    """How many waiting requests engines are given: within their slots, and beyond.

    What an engine has queued keeps its slots busy while the next request is on its way, but is bound to it: at the end of a batch it
    would wait there while slots of others are free. So places beyond the slots are given only while so many requests wait that every
    engine's queue can be filled once more; the last ones, as many as all queues hold, go to free slots alone, wherever one ends first.

    Args:
        waiting: requests without an engine.
        loads: requests that each engine has.
        capacities: what each engine takes.
    """
    free = sum(max(capacities[engine].slots - load, 0) for engine, load in loads.items())
    within = min(waiting, free)
    room = sum(max(capacities[e].slots + capacities[e].queued - max(load, capacities[e].slots), 0) for e, load in loads.items())
    queues = sum(capacities[engine].queued for engine in loads)
    return within, min(max(waiting - free - queues, 0), room)


def surplus(loads: Mapping[int, int], waiting: int, capacities: Mapping[int, Capacity]) -> dict[int, int]:
    """Requests that overloaded engines should give away after others joined; empty where the difference does not pay.

    Args:
        loads: requests that each engine has.
        waiting: requests that have no engine yet; they will go to the least loaded ones.
        capacities: what each engine takes; an even share is in proportion to the slots.
    """
    slots = sum(capacities[engine].slots for engine in loads)
    total = sum(loads.values()) + waiting
    even = {engine: -(-(total * capacities[engine].slots) // slots) for engine in loads}
    return {engine: load - even[engine] for engine, load in loads.items() if load > UNEVEN * even[engine]}
