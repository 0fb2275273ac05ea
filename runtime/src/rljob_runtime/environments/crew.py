"""The processes of one environment of the user's: hands out calls, watches the clock, replaces what it had to kill.

::

    Begin, Step ──> line of an episode's process ──one at a time──> answered ──> Outcome
                                                        |
                                                        +── raised:           this environment is given up
                                                        +── limit passed:     the process and all it started are killed
                                                        +── process gone
                                                             either way once more with the same seed, in another environment, which takes
                                                             the episode's actions again; the second time the episode fails

Other episodes of a process that is gone (``episodes_per_process`` above 1) are played again up to where they were when their next call
comes; where that leads to another observation, the environment is no function of its seed and the episode fails.
"""

from __future__ import annotations

import pickle
import secrets
import selectors
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rljob_runtime.environments.calls import NONCE_BYTES, Begin, Release, Setup, Step
from rljob_runtime.environments.config import EnvironmentConfig
from rljob_runtime.environments.outcome import Counters, Failure, Outcome, parse_answer
from rljob_runtime.environments.processes import Processes
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.sandbox.process import BrokenProtocolError, SandboxProcess


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """An episode."""

    key: str
    seed: int
    pending: str | None = None
    """The action that it waits for; None while it begins."""
    waits: bool = True
    """Whether a call of it is not answered yet."""
    actions: list[str] = field(default_factory=list)
    """Answered so far."""
    observation: str | None = None
    """The last one; None before its first."""
    process: _Process | None = None
    begun: bool = False
    """Whether it has an environment in its process."""
    retried: bool = False
    released: bool = False


class _Process(SandboxProcess):
    """One process, and who is in it."""

    def __init__(self, setup: Setup, log_file: Path, startup_timeout_s: float) -> None:
        super().__init__(
            "rljob_runtime.environments.child",
            pickle.dumps(setup),
            purpose="environment",
            log_file=log_file,
            startup_timeout_s=startup_timeout_s,
            disk_bytes=setup.disk_bytes,
        )
        self.members: list[_Member] = []
        self.line: deque[_Member] = deque()
        self.current: _Member | None = None
        self.nonce = b""
        self.begins = False
        """Whether the call in work is a Begin."""


class Crew:
    """All processes of one environment; driven by one thread, which shares a selector among crews."""

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        folder: Path | None,
        log_file: Path,
        startup_timeout_s: float,
        selector: selectors.BaseSelector,
        deliver: Callable[[Outcome], None],
    ) -> None:
        """Start one process and wait until the class is constructed in it.

        Raises:
            EnvironmentSetupError: it cannot be, or not within ``startup_timeout_s``.
        """
        self.counters = Counters()
        self._config, self._log_file, self._deliver = config, log_file, deliver
        isolation = config.isolation
        self._setup = Setup(
            reference=config.type,
            folder=None if folder is None else str(folder.resolve()),
            parameters=dict(config.parameters),
            network=isolation.network,
            processes=isolation.processes,
            read_paths=isolation.read_paths,
            memory_bytes=isolation.memory_bytes,
            disk_bytes=isolation.disk_bytes,
        )
        self._processes = Processes(
            self,
            lambda: _Process(self._setup, log_file, startup_timeout_s),
            name=config.name,
            loads=f"{config.type} was imported and constructed",
            log_file=log_file,
            selector=selector,
        )
        self._members: dict[str, _Member] = {}
        self._waiting: deque[_Member] = deque()
        """Episodes without a process, oldest first."""
        try:
            self._processes.start_first(self.read)
        except BaseException:
            self.close()
            raise

    def begin(self, key: str, seed: int) -> None:
        """Begin an episode; its first turn is delivered."""
        self._members[key] = member = _Member(key=key, seed=seed)
        self._waiting.append(member)
        self._hand_out()

    def step(self, key: str, action: str) -> None:
        """Act in an episode; the turn is delivered."""
        member = self._members[key]
        member.pending, member.waits = action, True
        if member.process is None:
            self._waiting.append(member)
        else:
            member.process.line.append(member)
        self._hand_out()

    def release(self, key: str) -> None:
        """An episode is over or given up: nothing more of it is delivered."""
        member = self._members.pop(key, None)
        if member is None:
            return
        member.released = True
        process = member.process
        if process is None:
            if member in self._waiting:
                self._waiting.remove(member)
        elif process.current is not member:  # else when its call is answered, or killed
            self._leave(member)
        self._hand_out()

    def read(self, process: object) -> None:
        """Take in what a process sent.

        Raises:
            EnvironmentSetupError: it cannot construct the class.
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
        return min((p.deadline for p in self._processes.running if not p.ready or p.current is not None), default=None)

    def check_deadlines(self, now: float) -> None:
        """Kill processes whose call takes too long.

        Raises:
            EnvironmentSetupError: one was not ready in time.
        """
        self._processes.check_starts(now)
        for process in [p for p in self._processes.running if p.deadline <= now and p.current is not None]:
            self._gone(process, Failure.TIMEOUT, f"took longer than its limit of {self._config.step_timeout_s:g} s")
        self._hand_out()

    def close(self) -> None:
        """End all processes and what they started; may be called twice."""
        self._processes.close()

    @property
    def sandbox(self) -> str:
        """What keeps the processes in, as they say."""
        return self._processes.sandbox

    @property
    def max_episodes(self) -> int:
        """Places of all processes."""
        return self._config.isolation.max_processes * self._config.isolation.episodes_per_process

    def _hand_out(self) -> None:
        """Give waiting episodes a place, start processes for the rest, and each free process its next call."""
        lost = True
        while lost:
            self._place()
            free = [p for p in self._processes.running if p.ready and p.current is None and p.line]
            lost = not all([self._send_next(process) for process in free])

    def _place(self) -> None:
        isolation = self._config.isolation
        while self._waiting:
            open_places = [p for p in self._processes.running if p.ready and len(p.members) < isolation.episodes_per_process]
            if not open_places:
                break
            process = min(open_places, key=lambda p: len(p.members))
            member = self._waiting.popleft()
            member.process, member.begun = process, False
            process.members.append(member)
            process.line.append(member)
        starting = sum(not p.ready for p in self._processes.running)
        lacking = -(-len(self._waiting) // isolation.episodes_per_process) - starting
        for _ in range(min(lacking, isolation.max_processes - len(self._processes.running))):
            self._processes.start()

    def _send_next(self, process: _Process) -> bool:
        """Send the next call of a process's line; False when the process is gone."""
        member = process.line.popleft()
        process.current, process.begins = member, not member.begun
        process.nonce = secrets.token_bytes(NONCE_BYTES)
        if process.begins:
            call: Begin | Step = Begin(key=member.key, seed=member.seed, actions=tuple(member.actions))
        else:
            call = Step(key=member.key, action=member.pending or "")
        # Taking the actions again may take as long as they took.
        process.deadline = time.monotonic() + self._config.step_timeout_s * (1 + len(member.actions) * process.begins)
        sent = process.send(pickle.dumps((process.nonce, call)))
        if not sent:
            self._gone(process, Failure.DIED)
        return sent

    def _answered(self, process: _Process, frame: bytes) -> None:
        member = process.current
        if member is None or frame[:NONCE_BYTES] != process.nonce:
            raise BrokenProtocolError("it wrote an answer that no one asked for")
        turn, error, elapsed_s = parse_answer(frame[NONCE_BYTES:])
        process.current = None
        self.counters.took(elapsed_s, is_reset=process.begins)
        if member.released:
            self._leave(member)
        elif turn is None:
            self._leave(member)
            self._failed(member, Failure.RAISED, error)
        elif not process.begins:
            member.actions.append(member.pending or "")
            self._done(member, turn)
        else:
            self._has_begun(process, member, turn)

    def _has_begun(self, process: _Process, member: _Member, turn: Turn) -> None:
        member.begun = True
        if member.observation is None:
            self._done(member, turn)
        elif turn.observation != member.observation:
            self._leave(member)
            member.retried = True  # another attempt would end the same
            self._failed(member, Failure.RAISED, "its process was lost, and the same seed and actions led to another observation")
        else:
            process.line.appendleft(member)

    def _done(self, member: _Member, turn: Turn) -> None:
        member.observation, member.waits = turn.observation, False
        self._deliver(Outcome(key=member.key, turn=turn))

    def _failed(self, member: _Member, failure: Failure, message: str) -> None:
        """Once more, or the end of the episode. The member has no place."""
        self.counters.failures[failure] += 1
        if member.released:
            return
        if not member.retried:
            member.retried = True
            self.counters.retries += 1
            self._waiting.append(member)
            return
        del self._members[member.key]
        self._deliver(Outcome(key=member.key, error=f"environment {self._config.name!r}: {message}; its output: {self._log_file}"))

    def _gone(self, process: _Process, failure: Failure, why: str = "") -> None:
        """A process has ended or is of no use: end it, blame the call in work, and let the others begin elsewhere."""
        current = process.current
        self.counters.restarts += 1
        why = self._processes.lost(process, why)
        for member in process.members:
            member.process, member.begun = None, False
            if member is not current and member.waits:
                self._waiting.append(member)
        if current is not None:
            self._failed(current, failure, why)

    def _leave(self, member: _Member) -> None:
        """A member gives its place up."""
        process = member.process
        if process is None:
            return
        process.members.remove(member)
        if member in process.line:
            process.line.remove(member)
        member.process = None
        if member.begun:
            member.begun = False
            process.send(pickle.dumps((b"", Release(key=member.key))))
