"""Spreads samples over the reward workers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rljob_runtime.cluster.protocol import INLINE_BYTES, Pending, Worker, gather_all
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult


class RewardRouter:
    """Contiguous shares, the least loaded workers first; results come back in the order of the responses."""

    def __init__(self, workers: Sequence[Worker], timeout_s_per_sample: float) -> None:
        """``timeout_s_per_sample`` bounds one sample over all rewards; the worker enforces it, this is the outer deadline."""
        self._workers = workers
        self._timeout_s = timeout_s_per_sample
        self._load = [0] * len(workers)

    async def score(self, batch: RewardBatch) -> list[RewardResult]:
        """Score all responses.

        Raises:
            WorkerLostError: a reward worker itself is gone (a dying reward function only costs its sample).
        """
        if not batch.sample_ids:
            return []
        order = sorted(range(len(self._workers)), key=lambda i: (self._load[i], i))
        total = len(batch.sample_ids)
        share = -(-total // len(order))
        busiest = max(self._load)  # a worker scores one call after another
        taken: list[tuple[int, int]] = []
        for index in order[: -(-total // share)]:
            count = min(share, total - share * len(taken))
            self._load[index] += count
            taken.append((index, count))
        try:
            parts = [batch.part(place * share, place * share + count) for place, (_, count) in enumerate(taken)]
            workers = [self._workers[index] for index, _ in taken]
            sent: list[Any] = list(parts)
            if max(part.token_ids.nbytes for part in parts) >= INLINE_BYTES:
                sent = await asyncio.to_thread(lambda: [worker.share(part) for worker, part in zip(workers, parts, strict=True)])
            calls: list[Pending] = [worker.start("score", part) for worker, part in zip(workers, sent, strict=True)]
            answers = await gather_all(calls, self._timeout_s * (busiest + share) + 60.0)
        finally:
            for index, count in taken:
                self._load[index] -= count
        return [result for answer in answers for result in answer]
