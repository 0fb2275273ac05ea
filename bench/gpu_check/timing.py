"""Seconds of work on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_s(device: torch.device, repeat: int, work: Callable[[], object]) -> float:
    """Median seconds of ``work`` until the device is done, after one run that does not count."""
    seconds = []
    for _ in range(repeat + 1):
        synchronize(device)
        started = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
