"""What bare copies reach on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from rljob_runtime.offload.slabs import DEFAULT_CHUNK_BYTES

WIDTH = 4096
"""Rows and columns of every matrix that is moved: 64 MiB in float32."""


def limits(device: torch.device, total_bytes: int, repeat: int) -> dict[str, Any]:
    """Rates of bare copies of chunks between memory that is there already: what no switch on this machine can beat.

    On a GPU between pinned memory and the device, both directions, alone and at the same time. On a CPU memcpy; and memcpy with the memory
    taken from the system before (``load_fresh``) or given back after (``offload_freed``), as every switch there must do.
    """
    count = max(2, total_bytes // DEFAULT_CHUNK_BYTES if device.type == "cpu" else min(16, total_bytes // DEFAULT_CHUNK_BYTES))
    rounds = max(1, total_bytes // (count * DEFAULT_CHUNK_BYTES))
    moved_bytes = count * rounds * DEFAULT_CHUNK_BYTES
    host = [torch.empty(DEFAULT_CHUNK_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1) for _ in range(count)]
    there = [torch.ones(DEFAULT_CHUNK_BYTES, dtype=torch.uint8, device=device) for _ in range(count)]

    def copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for _ in range(rounds):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    result: dict[str, Any] = {
        "offload_gb_per_s": moved_bytes / timed(device, repeat, lambda: copies(host, there)) / 1e9,
        "load_gb_per_s": moved_bytes / timed(device, repeat, lambda: copies(there, host)) / 1e9,
    }
    if device.type == "cpu":
        there.clear()
        load_s, offload_s = _fresh_copies(host, repeat)
        return result | {"offload_freed_gb_per_s": moved_bytes / offload_s / 1e9, "load_fresh_gb_per_s": moved_bytes / load_s / 1e9}
    more_host, more_there = [torch.empty_like(h, pin_memory=True) for h in host], [torch.empty_like(t) for t in there]
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def both() -> None:
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(device))
        for _ in range(rounds):
            for index in range(count):
                with torch.cuda.stream(streams[0]):
                    host[index].copy_(there[index], non_blocking=True)
                with torch.cuda.stream(streams[1]):
                    more_there[index].copy_(more_host[index], non_blocking=True)
        for stream in streams:
            torch.cuda.current_stream(device).wait_stream(stream)

    return result | {"duplex_gb_per_s": 2 * moved_bytes / timed(device, repeat, both) / 1e9}


def _fresh_copies(host: list[torch.Tensor], repeat: int) -> tuple[float, float]:
    """Median seconds of copying ``host`` into memory just taken, and of copying that back and freeing it."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeat + 1):
        started = time.perf_counter()
        there = [torch.empty_like(chunk).copy_(chunk) for chunk in host]
        loaded = time.perf_counter()
        for chunk in reversed(host):
            chunk.copy_(there.pop())
        seconds[0].append(loaded - started)
        seconds[1].append(time.perf_counter() - loaded)
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def timed(device: torch.device, repeat: int, work: Callable[[], object]) -> float:
    """Median seconds of ``work`` until the device is done, after one run that does not count."""
    seconds = []
    for _ in range(repeat + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
