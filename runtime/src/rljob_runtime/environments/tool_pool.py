"""Processes that do the work of conversations: run programs, call functions, ask users, score answers.

::

    submit(ticket, work, limit) ──> line ──> a free process ──> answered ──> deliver(ticket, Answer)
                                                  |
                                                  +── limit passed, or process gone: killed with all it started, replaced when work waits

No work is done twice: a hang costs its limit once, and what it was part of decides what that means. Processes are started when work waits,
as many at a time as there are cores.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rljob_runtime.environments.outcome import Failure
from rljob_runtime.environments.processes import Processes
from rljob_runtime.environments.tool_work import NONCE_BYTES, Answer, Setup, Work
from rljob_runtime.sandbox.process import BrokenProtocolError, SandboxProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    ticket: object
    work: Work
    limit_s: float


class _Process(SandboxProcess):
    """One process and the work in its hands."""

    def __init__(self, setup: Setup, log_file: Path, startup_timeout_s: float) -> None:
        super().__init__(
            "rljob_runtime.environments.tool_child",
            pickle.dumps(setup),
            purpose="tools",
            log_file=log_file,
            startup_timeout_s=startup_timeout_s,
            disk_bytes=setup.disk_bytes,
        )
        self.job: _Job | None = None
        self.nonce = b""


class ToolPool:
    """Processes with the same setup; driven by one thread, which shares a selector among pools."""

    def __init__(
        self,
        setup: Setup,
        *,
        name: str,
        log_file: Path,
        max_processes: int,
        startup_timeout_s: float,
        selector: selectors.BaseSelector,
        deliver: Callable[[object, Answer], None],
    ) -> None:
        """Start one process and wait until it has imported everything.

        Raises:
            EnvironmentSetupError: it cannot, or not within ``startup_timeout_s``.
        """
        self.restarts = 0
        self._max_processes, self._deliver = max_processes, deliver
        self._processes = Processes(
            self,
            lambda: _Process(setup, log_file, startup_timeout_s),
            name=name,
            loads="its tools were ready",
            log_file=log_file,
            selector=selector,
        )
        self._line: deque[_Job] = deque()
        try:
            self._processes.start_first(self.read)
        except BaseException:
            self.close()
            raise

    def submit(self, ticket: object, work: Work, limit_s: float) -> None:
        """Have work done; its answer is delivered with the ticket, once."""
        self._line.append(_Job(ticket=ticket, work=work, limit_s=limit_s))
        self._hand_out()

    def withdraw(self, is_unwanted: Callable[[object], bool]) -> None:
        """Forget work that waits, by its ticket; what runs goes on to its end or its limit."""
        self._line = deque(job for job in self._line if not is_unwanted(job.ticket))

    def read(self, process: object) -> None:
        """Take in what a process sent.

        Raises:
            EnvironmentSetupError: it cannot import what it is for.
        """
        if not isinstance(process, _Process) or process not in self._processes.running:
            return
        try:
            frames, closed = self._processes.receive(process)
            for frame in frames:
                self._answered(process, frame)
        except BrokenProtocolError as error:
            self._gone(process, Failure.DIED, str(error))
        else:
            if closed:
                self._gone(process, Failure.DIED)
        self._hand_out()

    def next_deadline(self) -> float | None:
        """When ``check_deadlines`` has something to do, on the monotonic clock."""
        return min((p.deadline for p in self._processes.running if not p.ready or p.job is not None), default=None)

    def check_deadlines(self, now: float) -> None:
        """Kill processes whose work takes too long.

        Raises:
            EnvironmentSetupError: one was not ready in time.
        """
        self._processes.check_starts(now)
        for process in [p for p in self._processes.running if p.deadline <= now]:
            if process.job is not None:
                self._gone(process, Failure.TIMEOUT, f"ran past its limit of {process.job.limit_s:g} s")
        self._hand_out()

    def close(self) -> None:
        """End all processes and what they started; may be called twice."""
        self._processes.close()

    @property
    def sandbox(self) -> str:
        """What keeps the processes in, as they say."""
        return self._processes.sandbox

    def _hand_out(self) -> None:
        while self._line and (free := next((p for p in self._processes.running if p.ready and p.job is None), None)) is not None:
            self._send(free, self._line.popleft())
        starting = sum(not process.ready for process in self._processes.running)
        at_once = min(len(self._line), os.cpu_count() or 1) - starting
        for _ in range(min(at_once, self._max_processes - len(self._processes.running))):
            self._processes.start()

    def _send(self, process: _Process, job: _Job) -> None:
        process.job, process.nonce = job, secrets.token_bytes(NONCE_BYTES)
        process.deadline = time.monotonic() + job.limit_s
        if not process.send(pickle.dumps((process.nonce, job.work))):
            process.job = None
            self._line.appendleft(job)  # it died before it had the work
            self._gone(process, Failure.DIED)

    def _answered(self, process: _Process, frame: bytes) -> None:
        job = process.job
        if job is None or frame[:NONCE_BYTES] != process.nonce:
            raise BrokenProtocolError("it wrote an answer that no one asked for")
        answer = _parse(frame[NONCE_BYTES:])
        process.job = None
        self._deliver(job.ticket, answer)

    def _gone(self, process: _Process, failure: Failure, why: str = "") -> None:
        """A process has ended or is of no use: its work has failed."""
        job = process.job
        self.restarts += 1
        why = self._processes.lost(process, why)
        if job is not None:
            self._deliver(job.ticket, Answer(error=why, failure=failure, elapsed_s=job.limit_s if failure is Failure.TIMEOUT else 0.0))


def _parse(body: bytes) -> Answer:
    """Raises BrokenProtocolError where it is no answer."""
    try:
        answer = json.loads(body)
        elapsed_s = float(answer["elapsed_s"])
        if "error" in answer:
            return Answer(error=str(answer["error"]), failure=Failure.RAISED, elapsed_s=elapsed_s)
        return Answer(value=answer["value"], elapsed_s=elapsed_s)
    except (ValueError, TypeError, KeyError) as error:
        raise BrokenProtocolError("it wrote something that is not an answer") from error
