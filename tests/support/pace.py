"""How long to wait, on a machine that may be slow or busy with other tests."""

from __future__ import annotations

import time

HANG_S = 180.0
"""Bound of a wait for something that comes soon or never: a wait that ends well costs nothing, so this says nothing of speed."""
_PROBE_CPU_S = 0.05


def slowdown() -> float:
    """How many seconds pass now for a second of one thread's processor time, at least 1; limits of elapsed time are multiplied by it."""
    cpu_s, wall_s = time.thread_time(), time.monotonic()
    while (used_s := time.thread_time() - cpu_s) < _PROBE_CPU_S:
        pass
    return max(1.0, (time.monotonic() - wall_s) / used_s)
