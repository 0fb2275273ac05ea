"""Python's garbage collector around work that makes many objects and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside; what loses its last reference is freed all the same.

    While a large plan grows, the collector would walk all of it again and again and find nothing: half of the time at 10^5 devices.
    Threads that overlap in here only end the pause early.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
