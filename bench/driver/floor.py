"""``python -m bench.driver.floor SECONDS``: how long this machine stops a program that has nothing to wait for; prints a JSON object.

One thread reads the clock over and over, then fills half a megabyte of fresh memory over and over, as a driver does that takes in
responses. Each gap between two readings that is longer than the work is the machine's: its hypervisor, its kernel, other programs.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable

LONG_S = 0.05
FRESH_BYTES = 512 << 10


def gaps(work: Callable[[], object], seconds: float) -> dict[str, float]:
    """The longest time that one call of ``work`` took, and how many took longer than :data:`LONG_S`."""
    longest_s, above, calls = 0.0, 0, 0
    now_s = began_s = time.perf_counter()
    while now_s - began_s < seconds:
        work()
        before_s, now_s = now_s, time.perf_counter()
        longest_s = max(longest_s, now_s - before_s)
        above += now_s - before_s > LONG_S
        calls += 1
    return {"seconds": seconds, "calls": calls, "longest_ms": 1e3 * longest_s, "above_50_ms": above}


def fill() -> None:
    """Take memory from the system, touch each page, and give it back."""
    with mmap.mmap(-1, FRESH_BYTES) as fresh:
        fresh.write(_FILL)


_FILL = b"\x01" * FRESH_BYTES


def main() -> int:
    """Half of the time each."""
    seconds = float(sys.argv[1]) / 2
    sys.stdout.write(json.dumps({"clock": gaps(time.perf_counter, seconds), "memory": gaps(fill, seconds)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
