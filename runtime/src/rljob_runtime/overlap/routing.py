"""Which engine gets which request. Pure decisions over loads; O((requests + engines) log engines).

Rule: the engine that has the request's beginning cached, its preferred engine, unless another one has clearly less to do; then the one
with the least load for its capacity. Without that limit all samples of a long prompt would queue at one engine while others idle.

How much less is counted in tokens: another engine computes the cached tokens again, and a request ahead there costs about as many tokens
as a request samples, since a step of an engine computes a token of each. So a turn of an episode with 2,000 tokens behind it stays with up
to 20 requests more there where requests sample 100, and moves where they sample 2,000.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

AFFINITY_MARGIN = 2
"""By how many requests the preferred engine may always be ahead of the least loaded engine and still be chosen."""
UNEVEN = 1.5
"""Requests move to engines that join only from those that have this many times their even share: moving costs a prefill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many requests an engine takes."""

    slots: int
    """Requests it computes at the same time, at least 1."""
    queued: int = 0
    """Further ones it may hold so that no slot idles between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheAffinity:
    """The engine that has a request's beginning cached."""

    engine: int
    tokens: int
    """How many it has, at least 1."""


@dataclass(slots=True, eq=False)
class GroupAffinity:
    """Where the samples of one prompt are that should stay together; all of them hold the same object."""

    engine: int | None = None
    """The engine first chosen for one of them."""
    num_there: int = 0
    """How many of them it has."""


class Router:
    """Gives requests engines, one after another; each counts for the next ones. O(log engines) per request."""

    def __init__(
        self, loads: dict[int, int], limits: Mapping[int, int], *, margin: int = AFFINITY_MARGIN, request_tokens: float = math.inf
    ) -> None:
        """Begin with what engines have.

        Args:
            loads: requests that each engine has; only these engines are chosen. Changed here.
            limits: requests that each engine may have; loads are compared relative to them.
            margin: see ``AFFINITY_MARGIN``; 0 follows the load alone.
            request_tokens: that a request samples, in the mean; above 0.
        """
        self._loads, self._limits, self._margin, self._request_tokens = loads, limits, margin, request_tokens
        self._heap = [(_share(load, limits[engine]), engine) for engine, load in loads.items()]
        heapq.heapify(self._heap)

    def place(self, affinity: CacheAffinity | None, group: GroupAffinity | None = None, *, waiting_there: int = 0) -> int | None:
        """The engine of a request.

        Args:
            affinity: which engine has its beginning cached; None: none.
            group: where others of its group are, to which it is added. A request without a cached beginning prefers its group's engine.
                Those of a group do not count against that, so that it gets all of the group, whatever its size, as long as nothing else
                loads it. None: it is on its own.
            waiting_there: requests that wait for that engine, this one among them.

        Returns:
            None where all engines are full, or where it does better to wait until that engine is not.
        """
        best = self._least_loaded()
        if best is None:
            return None
        if group is not None and group.engine is not None and group.engine not in self._loads:
            group.engine, group.num_there = None, 0  # it can be given nothing
        engine: int | None = best
        if affinity is not None and self._margin and affinity.engine in self._loads:
            full = self._loads[affinity.engine] >= self._limits[affinity.engine]
            own = group.num_there if group is not None and group.engine == affinity.engine else 0
            ahead = self._loads[affinity.engine] - own + (waiting_there if full else 0)
            if self._stays(affinity.engine, ahead - max(self._margin, affinity.tokens / self._request_tokens), best):
                engine = None if full else affinity.engine
        elif group is not None and group.engine is not None and self._loads[group.engine] < self._limits[group.engine]:
            if self._stays(group.engine, self._loads[group.engine] - group.num_there - self._margin, best):
                engine = group.engine
        if engine is not None:
            self._loads[engine] += 1
            if group is not None:
                _settle(group, engine)
        return engine

    def _stays(self, engine: int, ahead: float, best: int) -> bool:
        """Whether a load of ``ahead`` there is no more than the least one, both relative to the limits."""
        return ahead * self._limits[best] <= self._loads[best] * self._limits[engine]

    def _least_loaded(self) -> int | None:
        heap, loads, limits = self._heap, self._loads, self._limits
        while heap and heap[0][0] != (current := _share(loads[heap[0][1]], limits[heap[0][1]])):  # outdated by what was placed
            heapq.heapreplace(heap, (current, heap[0][1]))
        return heap[0][1] if heap and loads[heap[0][1]] < limits[heap[0][1]] else None


def _share(load: int, limit: int) -> float:
    """Load relative to the limit; an engine that takes nothing is full."""
    return load / limit if limit else float("inf")


def _settle(group: GroupAffinity, engine: int) -> None:
    """One of the group goes to ``engine``, which becomes the group's engine if it has none."""
    if group.engine is None:
        group.engine, group.num_there = engine, 0
    group.num_there += group.engine == engine


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
