"""Ends a run from a callback or from another thread than its own."""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol


class Stoppable(Protocol):
    """The running attempt; called in its event loop."""

    def ask(self, why: str) -> None:
        """End after the step under way, as a finished run ends."""

    def interrupt(self) -> None:
        """End as on Ctrl-C."""


class Stopper:
    """May be used from any thread, also before the run has begun and after it is over."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._attempt: Stoppable | None = None
        self._interrupted = False
        self.reason: str | None = None
        """Why the run was asked to stop; None: it was not."""

    def stop(self, reason: str) -> None:
        """End after the step under way: with a checkpoint, and with the model written. The first reason counts."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
                self._tell()

    def interrupt(self) -> None:
        """End as on Ctrl-C: after the step under way, the second time at once."""
        with self._lock:
            self._interrupted = True
            self._tell()

    def bind(self, attempt: Stoppable | None) -> None:
        """The attempt runs in this thread's event loop; None: it is over. What was asked before is passed on."""
        with self._lock:
            self._attempt = attempt
            self._loop = None if attempt is None else asyncio.get_running_loop()
            self._tell()

    def _tell(self) -> None:
        if self._loop is None or self._attempt is None:
            return
        if self._interrupted:
            self._interrupted = False
            self._loop.call_soon_threadsafe(self._attempt.interrupt)
        elif self.reason is not None:
            self._loop.call_soon_threadsafe(self._attempt.ask, self.reason)
