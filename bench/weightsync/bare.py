"""The limit of shared memory: as many bytes from one process into others, by as many copies, with nothing else done to them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier, Semaphore

import numpy as np

from rljob_runtime.weightsync.shared_memory import Segments, SharedBytes, prefix_of

TURNS = 2
TIMEOUT_S = 300.0


def bare_s(size_bytes: int, bucket_bytes: int, num_readers: int, repeat: int) -> float:
    """Seconds until all readers have all bytes: the fastest of some runs, the first of which is not counted.

    Args:
        size_bytes: of what every reader gets; a multiple of a bucket's.
        bucket_bytes: of each of the two segments that take turns.
        num_readers: processes that copy.
        repeat: runs that count.
    """
    context = multiprocessing.get_context("spawn")
    bucket = min(bucket_bytes, size_bytes)
    count = size_bytes // bucket
    segments = Segments.equal(prefix_of(f"bare{os.getpid()}"), TURNS, bucket)
    barrier, free = context.Barrier(num_readers + 1), [context.Semaphore(0) for _ in range(TURNS)]
    full = [context.Semaphore(0) for _ in range(num_readers)]
    shared = [segments.shared(turn, bucket) for turn in range(TURNS)]
    readers = [context.Process(target=_read, args=(shared, count, repeat + 1, barrier, one, free), daemon=True) for one in full]
    source = np.ones(size_bytes, dtype=np.uint8)
    try:
        for reader in readers:
            reader.start()
        return min(_write(source, segments, count, barrier, full, free) for _ in range(repeat + 1))
    finally:
        for reader in readers:
            reader.kill()
            reader.join()
        segments.close()


def _write(
    source: np.ndarray, segments: Segments, count: int, barrier: Barrier, full: Sequence[Semaphore], free: Sequence[Semaphore]
) -> float:
    bucket = source.size // count
    barrier.wait(TIMEOUT_S)
    started = time.perf_counter()
    for index in range(count):
        turn = index % TURNS
        for _ in full if index >= TURNS else ():
            _acquired(free[turn])
        np.copyto(segments.array(turn, bucket), source[index * bucket : (index + 1) * bucket])
        for reader in full:
            reader.release()
    barrier.wait(TIMEOUT_S)
    elapsed_s = time.perf_counter() - started
    for index in range(max(0, count - TURNS), count):  # what nobody waited for
        for _ in full:
            _acquired(free[index % TURNS])
    return elapsed_s


def _read(shared: Sequence[SharedBytes], count: int, runs: int, barrier: Barrier, full: Semaphore, free: Sequence[Semaphore]) -> None:
    """A reader's process."""
    own = np.zeros(count * shared[0].size_bytes, dtype=np.uint8).reshape(count, -1)
    for _ in range(runs):
        barrier.wait(TIMEOUT_S)
        for index in range(count):
            _acquired(full)
            np.copyto(own[index], shared[index % TURNS].view())
            free[index % TURNS].release()
        barrier.wait(TIMEOUT_S)


def _acquired(semaphore: Semaphore) -> None:
    if not semaphore.acquire(timeout=TIMEOUT_S):
        raise TimeoutError(f"bare copies: the other side was not there within {TIMEOUT_S:.0f} s")
