"""Limits of CPU time that hold on any machine: measured in seconds of the machine they were set on."""

import functools
import time

YARDSTICK_S = 0.06
"""What the yardstick took there."""
BUSY = 1.5
"""Other work on the same cores makes the same instructions take longer."""


@functools.cache
def slowness() -> float:
    """How many times longer the yardstick takes here; at least 1."""
    return max(min(_yardstick_s() for _ in range(3)) / YARDSTICK_S, 1.0)


def limit_s(seconds: float) -> float:
    """CPU seconds that may be used here where ``seconds`` are allowed on the machine of the yardstick."""
    return seconds * slowness() * BUSY


def _yardstick_s() -> float:
    started_s = time.process_time()
    sum(range(5_000_000))
    return time.process_time() - started_s
