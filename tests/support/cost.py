"""Limits of CPU time that hold on any machine: measured in seconds of the machine they were set on."""

import contextlib
import functools
import gc
import time
from collections.abc import Iterator

YARDSTICK_S = 0.045
"""What the yardstick took there: half of what it takes on cores on which `make test` takes 2.3 times as long (``docs/figures.md``)."""
BUSY = 1.5
"""Other work on the same cores makes the same instructions take longer."""


@functools.cache
def slowness() -> float:
    """How many times longer the yardstick takes here; at least 1."""
    gc.disable()
    try:
        return max(min(_yardstick_s() for _ in range(3)) / YARDSTICK_S, 1.0)
    finally:
        gc.enable()


def limit_s(seconds: float) -> float:
    """CPU seconds that may be used here where ``seconds`` are allowed on the machine of the yardstick."""
    return seconds * slowness() * BUSY


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """The body takes at most ``seconds`` of CPU time; what other tests left in memory is not searched for garbage meanwhile.

    Nor later: unfreezing would add all that the process imported and collected, a second of searching each time from then on.
    """
    gc.collect()
    gc.freeze()
    started_s = time.process_time()
    yield
    used_s = time.process_time() - started_s
    assert used_s < limit_s(seconds), f"{used_s:.2f} s of CPU time, allowed are {limit_s(seconds):.2f}"


def _yardstick_s() -> float:
    """Objects are made and looked up, as in what is measured; sums in the processor's registers would say nothing of its caches."""
    started_s = time.process_time()
    made = {(str(number), number): [number] for number in range(100_000)}
    assert all(made[place] for place in made)
    return time.process_time() - started_s
