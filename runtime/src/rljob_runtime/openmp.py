"""How torch's threads on the CPU wait for each other.

libgomp, the OpenMP of torch's wheels, lets a thread spin for milliseconds before it sleeps. Where other programs want the cores too, and in
a job they do, the thread that is waited for often has none: two spinning threads then take several times their processor time. With
1,000 rounds a small training step on two shared cores took 39 instead of 55 ms of processor time, and on busy ones (load 25) 56 instead of
297; on idle cores it is no slower.
"""

from __future__ import annotations

import os
from typing import Final

SPIN_VARIABLE: Final = "GOMP_SPINCOUNT"
SHORT_SPIN: Final = "1000"


def set_short_spin() -> None:
    """Let threads of this process and its children spin briefly, unless its environment says something; before torch is imported."""
    os.environ.setdefault(SPIN_VARIABLE, SHORT_SPIN)
