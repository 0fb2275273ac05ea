"""An event loop whose clock jumps to the next timer: seconds cost nothing, and a hang is an error."""

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
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


def run_virtual(main: Coroutine[Any, Any, Any]) -> Any:
    """``asyncio.run`` in virtual time; a warning of the loop, such as an error that nobody saw, is an error."""
    problems: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda loop, context: problems.append(context))
        value = runner.run(main)
        gc.collect(0)
    assert not problems, problems
    return value
