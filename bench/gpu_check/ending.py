"""The end of the program before all checks are done: its time is over, or it is asked to end."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class CutOffError(BaseException):
    """Raised in the middle of whatever is being done. A BaseException: a check goes on after errors of its own."""

    def __init__(self, why: str, exit_code: int | None = None) -> None:
        """``exit_code``: of the program; None leaves it to what was measured."""
        super().__init__(why)
        self.exit_code = exit_code


@contextmanager
def limited(seconds: float, why: str) -> Iterator[None]:
    """Raise :class:`CutOffError` inside after so many seconds (infinity: no limit), and at SIGINT and SIGTERM. In the main thread only."""

    def end(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if number == signal.SIGALRM:
            raise CutOffError(why)
        raise CutOffError(f"ended by {signal.Signals(number).name}", 128 + number)

    numbers = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, end) for number in numbers}
    timer = signal.setitimer(signal.ITIMER_REAL, 0 if math.isinf(seconds) else max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in handlers.items():
            signal.signal(number, handler)
