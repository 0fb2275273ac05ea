"""Which engine gets which request. Pure decisions over loads; O((requests + engines) log engines).

Rule: the engine that has the request's prefix cached, unless another one has clearly less to do; then the least loaded one. Without
that break all samples of a long prompt would queue at one engine while others idle.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

AFFINITY_MARGIN = 2
"""By how many requests a home engine may be ahead of the least loaded one and still be chosen."""
UNEVEN = 1.5
"""Requests move to new engines only from those that have so many times their even share: moving costs a prefill."""


def route(homes: Sequence[int | None], loads: Mapping[int, int], limit: int, margin: int = AFFINITY_MARGIN) -> list[int | None]:
    """Engines for waiting requests, in their order.

    Args:
        homes: per request the engine that may have its prefix cached; None: no engine has.
        loads: requests that each engine has; only these engines are chosen.
        limit: requests an engine may have.
        margin: see ``AFFINITY_MARGIN``; 0 follows the load alone.

    Returns:
        Per request an engine, or None where all are full.
    """
    now = dict(loads)
    heap = [(load, engine) for engine, load in now.items()]
    heapq.heapify(heap)
    chosen: list[int | None] = []
    for home in homes:
        while heap and heap[0][0] != now[heap[0][1]]:  # outdated by a choice of a home engine
            heapq.heapreplace(heap, (now[heap[0][1]], heap[0][1]))
        if not heap or heap[0][0] >= limit:
            chosen.append(None)
            continue
        least, engine = heap[0]
        if margin and home is not None and home in now and now[home] <= least + margin and now[home] < limit:
            engine = home
        now[engine] += 1
        chosen.append(engine)
    return chosen


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
