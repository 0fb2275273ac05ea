"""An event loop whose clock jumps to the next timer: seconds cost nothing, and a hang is an error."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")


class JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: the time until the next timer is over at once."""

    def __init__(self) -> None:
        """At 0 s."""
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """As the standard library's; the clock jumps by ``timeout``.

        Raises:
            AssertionError: there is no timer, so that nothing would ever happen.
        """
        if timeout is None:
            raise AssertionError("nothing is ready and no timer runs: this would hang")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Nothing in it may wait for another thread or process; what is meant for a thread is called in place."""

    def __init__(self, selector: JumpingSelector | None = None) -> None:
        """``selector``: one that does more than jump."""
        self._jumping = selector or JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now_s

    def run_in_executor(self, executor: Any, func: Callable[[*Arguments], Value], *args: *Arguments) -> asyncio.Future[Value]:
        """Call ``func`` here, in no virtual time: while a thread computed, the clock would jump from timer to timer."""
        future: asyncio.Future[Value] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits the future gets it, as from a thread
            future.set_exception(error)
        return future


def run_virtual(main: Coroutine[Any, Any, Value]) -> Value:
    """``asyncio.run`` in virtual time.

    Raises:
        AssertionError: it would hang, or something failed in the loop that nobody waited for.
    """
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: problems.append(context))
        value = runner.run(main)
    if problems:
        raise AssertionError(f"a task of the simulation failed: {problems}")
    return value
