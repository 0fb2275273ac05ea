"""The simulation's event loop, with processes that end between two steps of their tasks."""

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

from rljob_runtime.simulation import virtual_time


class Killed(BaseException):
    """The process ends between two steps of its tasks."""


class _KillingSelector(virtual_time.JumpingSelector):
    def __init__(self) -> None:
        super().__init__()
        self.rounds_left: int | None = None
        """Until the process is killed."""
        self.on_kill: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[Any]:
        if self.rounds_left is not None:
            self.rounds_left -= 1
            if self.rounds_left < 0:
                self.rounds_left = None
                self.on_kill()
                raise Killed
        return super().select(timeout)


class VirtualLoop(virtual_time.VirtualLoop):
    """Starts at 0 s. Nothing in it may wait for another thread or process."""

    def __init__(self) -> None:
        self._killing = _KillingSelector()
        super().__init__(self._killing)

    def kill_after(self, rounds: int | None, on_kill: Callable[[], None]) -> None:
        """Raise :class:`Killed` after so many rounds of the loop, never if None; what its tasks do then, being cancelled, never was."""
        self._killing.rounds_left, self._killing.on_kill = rounds, on_kill


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run`` in virtual time; a warning of the loop, such as an error that nobody saw, is an error."""
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: problems.append(context))
        value = runner.run(main)
        gc.collect(0)
    assert not problems, problems
    return value


def run_until_killed(main: Coroutine[Any, Any, Any], rounds: int, on_kill: Callable[[], None]) -> bool:
    """Run in virtual time for ``rounds`` of the event loop at most; whether it was killed, after ``on_kill``."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        loop.kill_after(rounds, on_kill)
        try:
            runner.run(main)
        except Killed:
            return True
        loop.kill_after(None, on_kill)
    return False
