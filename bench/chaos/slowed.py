"""A process on a node that is far too busy: stopped for most of the time, in bursts, and never for long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

STOPPED_S: Final = 0.4
RUNS_S: Final = 0.1
"""A fifth of the time. Other work of the machine comes on top, so that it may be less, and never more."""


class Slowed:
    """A context manager, within which one process gets a fifth of its time; it goes on normally afterwards."""

    def __init__(self, pid: int, *, send: Callable[[int, int], None] = os.kill) -> None:
        """``send`` is what sends signals."""
        self.num_bursts = 0
        self._pid = pid
        self._send = send
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._bursts, daemon=True)

    def __enter__(self) -> Slowed:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()

    def _bursts(self) -> None:
        try:
            while not self._over.is_set():
                self._send(self._pid, signal.SIGSTOP)
                try:
                    self._over.wait(STOPPED_S)
                finally:
                    self._send(self._pid, signal.SIGCONT)
                self.num_bursts += 1
                self._over.wait(RUNS_S)
        except ProcessLookupError:
            return  # it has ended, which is for others to judge
