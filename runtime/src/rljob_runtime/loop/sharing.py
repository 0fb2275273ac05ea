"""Hands batches to workers: what several ranks compute together is sent once, and nothing large is written in the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rljob_runtime.cluster.protocol import INLINE_BYTES, Worker
from rljob_runtime.records import TrainBatch
from rljob_runtime.sampling_mask import SamplingMask


async def by_worker(workers: Sequence[Worker], shares: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Arguments of each worker's call.

    Args:
        workers: in rank order.
        shares: arguments of each data-parallel share; neighboring workers, equally many, take the same one.
    """
    together = len(workers) // len(shares)
    if all(size_bytes(value) < INLINE_BYTES for share in shares for value in share):
        given = list(shares)
    else:
        given = await asyncio.to_thread(
            lambda: [tuple(sent(workers[i * together], value) for value in share) for i, share in enumerate(shares)]
        )
    return [given[rank // together] for rank in range(len(workers))]


def sent(worker: Worker, value: Any) -> Any:
    """What stands for a value as an argument of calls of this worker and others: itself where it is small. May take long, in any thread."""
    return worker.share(value) if size_bytes(value) >= INLINE_BYTES else value


def size_bytes(value: object) -> int:
    """Of the arrays in a value."""
    match value:
        case np.ndarray():
            return value.nbytes
        case SamplingMask():
            return value.size_bytes
        case TrainBatch():
            return sum(size_bytes(getattr(value, field.name)) for field in fields(value))
        case list():
            return sum(map(size_bytes, value))
    return 0
