"""An event loop with a virtual clock: it jumps to the next timer instead of waiting, so tests of minutes take milliseconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

T = TypeVar("T")
START = datetime(2026, 1, 1, tzinfo=UTC)


class _Selector(selectors.SelectSelector):
    """Never sleeps: the time to wait is added to the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing will ever happen: no callback is ready and no timer is set")
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a virtual clock that starts at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def now() -> datetime:
    """The virtual clock as a time of day."""
    return START + timedelta(seconds=asyncio.get_running_loop().time())
