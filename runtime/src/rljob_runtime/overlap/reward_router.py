"""Spreads samples over the reward workers."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_runtime.cluster.protocol import Pending, Worker, gather_all
from rljob_runtime.records import RewardRequest, RewardResult


class RewardRouter:
    """Contiguous shares, the least loaded workers first; results come back in the order of the requests."""

    def __init__(self, workers: Sequence[Worker], timeout_s_per_sample: float) -> None:
        """``timeout_s_per_sample`` bounds one sample over all rewards; the worker enforces it, this is the outer deadline."""
        self._workers = workers
        self._timeout_s = timeout_s_per_sample
        self._load = [0] * len(workers)

    async def score(self, requests: list[RewardRequest]) -> list[RewardResult]:
        """Score all requests.

        Raises:
            WorkerLostError: a reward worker itself is gone (a dying reward function only costs its sample).
        """
        order = sorted(range(len(self._workers)), key=lambda i: (self._load[i], i))
        share = -(-len(requests) // len(order))
        busiest = max(self._load)  # a worker scores one call after another
        calls: list[Pending] = []
        taken: list[tuple[int, int]] = []
        for position, index in enumerate(order):
            part = requests[position * share : (position + 1) * share]
            if part:
                self._load[index] += len(part)
                taken.append((index, len(part)))
                calls.append(self._workers[index].start("score", part))
        try:
            answers = await gather_all(calls, self._timeout_s * (busiest + share) + 60.0)
        finally:
            for index, count in taken:
                self._load[index] -= count
        return [result for answer in answers for result in answer]
