"""How torch's threads on the CPU wait for each other.

libgomp, the OpenMP of torch's wheels, lets a thread spin for milliseconds before it sleeps. Where other programs want the cores too, and in
a job they do, the thread that is waited for often has none: two spinning threads then take several times their processor time. A training
step of a small layer by two threads on two cores, beside four other programs: 470 to 700 ms as libgomp does it, 160 to 220 with 10,000
rounds, with 50 to 70 ms of processor time instead of 180 to 270. On idle cores both take 21 ms (medians of six), with 1,000 rounds 23, and
without spinning 29.
"""

from __future__ import annotations

import os
from typing import Final

SPIN_VARIABLE: Final = "GOMP_SPINCOUNT"
SHORT_SPIN: Final = "10000"


def set_short_spin() -> None:
    """Let threads of this process and its children spin briefly, unless its environment says something; before torch is imported."""
    os.environ.setdefault(SPIN_VARIABLE, SHORT_SPIN)
