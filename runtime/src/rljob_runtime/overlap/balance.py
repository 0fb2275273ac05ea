"""Divides work over ranks so that the busiest has the least. Pure and deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

Parts = list[list[int]]


def partition(costs: Sequence[float], num_parts: int) -> Parts:
    """Indexes of ``costs`` in ``num_parts`` parts, each index once, ascending; parts may be empty.

    The better of :func:`largest_difference` and :func:`longest_first`, by the largest sum, then by the spread of the sums: the first is
    nearly always better, but not for every input.

    Args:
        costs: finite, at least 0.
        num_parts: at least 1.
    """
    options = [largest_difference(costs, num_parts), longest_first(costs, num_parts)]
    return [sorted(part) for part in min(options, key=lambda parts: imbalance([sum(costs[i] for i in part) for part in parts]))]


def imbalance(loads: Sequence[float]) -> tuple[float, float]:
    """What to make small: the largest load, then the spread from largest to smallest."""
    return max(loads), max(loads) - min(loads)


def longest_first(costs: Sequence[float], num_parts: int) -> Parts:
    """The largest cost first, each to the part with the smallest sum."""
    parts: Parts = [[] for _ in range(num_parts)]
    loads = [(0.0, part) for part in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        parts[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return parts


def largest_difference(costs: Sequence[float], num_parts: int) -> Parts:
    """Karmarkar and Karp's largest differencing method for any number of parts (The differencing method of set partitioning, 1982).

    Every cost begins as a division of its own: one part with it, the others empty. The two divisions with the widest spreads are merged,
    the largest part of one with the smallest of the other, until one is left.
    """
    ties = count()
    heap = []  # (-spread, order of making, [(sum, members), ...] with the largest sum first)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        division: list[tuple[float, list[int]]] = [(0.0, [])] * (num_parts - 1)
        spread = costs[index] if num_parts > 1 else 0.0
        heap.append((-spread, next(ties), [(float(costs[index]), [index]), *division]))
    if not heap:
        return [[] for _ in range(num_parts)]
    heapq.heapify(heap)
    while len(heap) > 1:
        one, other = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, left + right) for (a, left), (b, right) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], next(ties), merged))
    return [members for _, members in heap[0][2]]
