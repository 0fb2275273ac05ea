"""Keeps passes of the event loop short: so much is handled in one of them, and what comes besides in the next ones."""

from __future__ import annotations

import asyncio
from collections import deque


class Portions:
    """First come, first served. Many tasks share one, whose answers may all arrive in the same pass.

    | wait | for                    | bounded by                              | unblocked by      |
    |------|------------------------|-----------------------------------------|-------------------|
    | turn | a pass with room in it | passes: (all that waits) / size, and one | the loop's passes |
    """

    def __init__(self, size: int) -> None:
        """``size`` items a pass, plus what the last one let in has beyond that."""
        self._size = size
        self._left = size
        self._renews = False
        """Whether the next pass will give new room: always, once something was let in."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing was let in in this pass or the one before, and nothing waits."""
        return not self._renews

    async def turn(self, count: int) -> None:
        """Wait until ``count`` more items may be handled; the caller then handles them without waiting."""
        if self._left > 0 and not self._waiting:
            self._let_in(count)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, count))
        await turn

    def _let_in(self, count: int) -> None:
        self._left -= count
        if not self._renews:
            self._renews = True
            asyncio.get_running_loop().call_soon(self._renew)

    def _renew(self) -> None:
        self._left, self._renews = self._size, False
        while self._waiting and self._left > 0:
            turn, count = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                self._let_in(count)
                turn.set_result(None)
