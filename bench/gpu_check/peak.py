"""The largest memory of tensors while something runs, on a GPU by its allocator and on a CPU by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(device: torch.device, work: Callable[[], object], there_bytes: int) -> int:
    """Of tensors on the device, what was there before included.

    Args:
        device: where.
        work: what runs.
        there_bytes: what is there before; a CPU's allocator does not know.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    current = highest = 0
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    events = [event for event in results.events() if event.name() == "[memory]"] if results is not None else []
    for event in sorted(events, key=lambda event: event.start_ns()):
        current += event.nbytes()
        highest = max(highest, current)
    return there_bytes + highest
