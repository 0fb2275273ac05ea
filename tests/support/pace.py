"""How long to wait, on a machine that may be slow or busy with other tests."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 180.0
"""Bound of a wait for something that comes soon or never: a wait that ends well costs nothing, so this says nothing of speed."""
POLL_S = 0.01


def until(what: str, true: Callable[[], bool]) -> None:
    """Wait for a state that only files show.

    Raises:
        AssertionError: not within :data:`HANG_S`.
    """
    deadline_s = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < deadline_s, f"{what}: not within {HANG_S:.0f} s"
        time.sleep(POLL_S)
