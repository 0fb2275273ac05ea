"""An event loop whose clock jumps to the next timer: seconds cost nothing, and a hang is an error."""

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class Killed(BaseException):
    """The process ends between two steps of its tasks."""


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
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
        if timeout is None:
            raise AssertionError("nothing is ready and no timer runs: this would hang")
        self.now_s += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at 0 s. Nothing in it may wait for another thread or process."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def kill_after(self, rounds: int | None, on_kill: Callable[[], None]) -> None:
        """Raise :class:`Killed` after so many rounds of the loop, never if None; what its tasks do then, being cancelled, never was."""
        self._jumping.rounds_left, self._jumping.on_kill = rounds, on_kill


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
