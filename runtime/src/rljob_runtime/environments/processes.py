"""The processes of one environment, whatever they do: started, waited for, read from, ended.

::

    start ──> (starting) ──receive: READY──> ready ──receive──> frames for the owner
                  │                            └── gone: killed with all it started
                  ├── FAILED, too late, or lost MAX_LOST_STARTS + 1 times in a row: EnvironmentSetupError
                  └── gone
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from rljob_runtime.errors import EnvironmentSetupError
from rljob_runtime.sandbox.process import SandboxProcess, UselessProcessError

_log = logging.getLogger(__name__)

MAX_LOST_STARTS = 3

ProcessT = TypeVar("ProcessT", bound=SandboxProcess)


class Processes(Generic[ProcessT]):
    """Driven by one thread, which shares a selector among owners."""

    def __init__(
        self, owner: object, make: Callable[[], ProcessT], *, name: str, loads: str, log_file: Path, selector: selectors.BaseSelector
    ) -> None:
        """Nothing is started yet.

        Args:
            owner: with the process what the selector has as data.
            make: starts a process.
            name: of the environment.
            loads: what a process does until it is ready, such as ``game:Chess was constructed``.
            log_file: receives what they print.
            selector: of the thread that reads.
        """
        self.running: list[ProcessT] = []
        self.sandbox = ""
        """What keeps them in, as they say."""
        self._owner, self._make, self._name, self._loads = owner, make, name, loads
        self._log_file, self._selector = log_file, selector
        self._lost_starts = 0

    def start(self) -> ProcessT:
        """Start one; it is ready later."""
        process = self._make()
        self.running.append(process)
        self._selector.register(process.socket, selectors.EVENT_READ, (self._owner, process))
        return process

    def start_first(self, read: Callable[[ProcessT], None]) -> ProcessT:
        """Start one and wait until it is ready; ``read`` is the owner's for what it sends.

        Raises:
            EnvironmentSetupError: it is of no use, ended, or was not ready in time.
        """
        process = self.start()
        while not process.ready:
            with selectors.DefaultSelector() as own:
                own.register(process.socket, selectors.EVENT_READ)
                own.select(max(0.0, process.deadline - time.monotonic()))
            read(process)
            if process not in self.running:
                raise EnvironmentSetupError(
                    f"environment {self._name!r}: its process ended before {self._loads}; its output: {self._log_file}"
                )
            self.check_starts(time.monotonic())
        return process

    def receive(self, process: ProcessT) -> tuple[list[bytes], bool]:
        """Return frames for the owner, and whether the process has closed its end.

        Raises:
            EnvironmentSetupError: it says that it is of no use.
            BrokenProtocolError: what it sent is no frame.
        """
        was_ready = process.ready
        try:
            frames, closed = process.receive()
        except UselessProcessError as error:
            raise EnvironmentSetupError(f"environment {self._name!r}: {error}") from error
        if process.ready and not was_ready:
            self.sandbox, self._lost_starts = process.sandbox, 0
        return frames, closed

    def check_starts(self, now: float) -> None:
        """Look whether all that start are in time.

        Raises:
            EnvironmentSetupError: one is not.
        """
        for process in self.running:
            if not process.ready and process.deadline <= now:
                raise EnvironmentSetupError(
                    f"environment {self._name!r}: it took longer than {process.startup_timeout_s:g} s until {self._loads}; "
                    f"its output: {self._log_file}"
                )

    def lost(self, process: ProcessT, why: str) -> str:
        """End one that is gone or of no use; returns ``why``, or how it ended by itself where that is empty.

        Raises:
            EnvironmentSetupError: too many in a row ended before they were ready.
        """
        ended = self.end(process, grace_s=0.0 if why else 1.0)
        why = why or f"its process died ({ended})"
        _log.warning("environment %s: process %d ended (%s)", self._name, process.process.pid, why)
        if not process.ready:
            self._lost_starts += 1
            if self._lost_starts > MAX_LOST_STARTS:
                raise EnvironmentSetupError(
                    f"environment {self._name!r}: processes ended {self._lost_starts} times in a row before {self._loads} ({ended}); "
                    f"their output: {self._log_file}"
                )
        return why

    def end(self, process: ProcessT, *, grace_s: float = 0.0) -> str:
        """End one and all it started; returns how it ended."""
        self.running.remove(process)
        self._selector.unregister(process.socket)
        return process.end(grace_s=grace_s)

    def close(self) -> None:
        """End all; may be called twice."""
        while self.running:
            self.end(self.running[-1])
