"""Parent side of the scoring processes: hands out work, watches the clock, replaces what it had to kill.

One caller at a time drives ``score``; a single loop over all workers reads results, enforces limits and restarts::

    starting --READY--> idle --batch--> busy --last result--> idle
       |                                 |
       +-- startup deadline: error       +-- limit passed, or process gone: that sample fails, the rest is handed out again,
                                             worker replaced (starting)

The clock of an evaluation starts when the parent reads the result before it, so that a slow parent never shortens a limit.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import RewardRequest, RewardResult
from rljob_runtime.rewards.child import FAILED, LENGTH, READY, RESULT, Setup, WireSample
from rljob_runtime.rewards.config import RewardConfig, check_rewards

_log = logging.getLogger(__name__)

_KILL_WAIT_S = 10.0
_SEND_TIMEOUT_S = 30.0
_MAX_BATCH = 128
_MIN_BATCH = 16
_MAX_IDLE_DEATHS = 3
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(slots=True)
class _Assignment:
    """A batch in a worker's hands."""

    samples: list[int]
    """Positions in the scored list."""
    current: int = 0
    """Position in ``samples`` of the one being scored."""
    reward: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    score: float = 0.0
    passed: bool = False
    elapsed_s: float = 0.0

    def advance(self) -> None:
        """Go on to the next sample."""
        self.current += 1
        self.reward = 0
        self.parts, self.score, self.passed, self.elapsed_s = {}, 0.0, False, 0.0


class _Worker:
    """One child process and its socket."""

    def __init__(self, setup: Setup, log_file: Path, startup_timeout_s: float) -> None:
        self.socket, theirs = socket.socketpair()
        try:
            with log_file.open("ab") as log:
                # A session of its own: killing the group takes along whatever the user's function started.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "rljob_runtime.rewards.child", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    env=_child_env(),
                    start_new_session=True,
                )
        except OSError:
            self.socket.close()
            raise
        finally:
            theirs.close()
        self.ready = False
        self.assignment: _Assignment | None = None
        self.deadline = time.monotonic() + startup_timeout_s
        self._buffer = bytearray()
        self.send(pickle.dumps(setup))

    def send(self, body: bytes) -> bool:
        """Send one frame; returns False when the process is gone or does not read within the send limit."""
        self.socket.settimeout(_SEND_TIMEOUT_S)
        try:
            self.socket.sendall(LENGTH.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            return False
        finally:
            self.socket.setblocking(False)
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the frames that have arrived, without waiting, and whether the process has closed its end."""
        closed = False
        try:
            data = self.socket.recv(1 << 16)
            closed = not data
            self._buffer += data
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionResetError:
            closed = True
        frames, start = [], 0
        while len(self._buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, start)
            if len(self._buffer) - start - LENGTH.size < size:
                break
            frames.append(bytes(self._buffer[start + LENGTH.size : start + LENGTH.size + size]))
            start += LENGTH.size + size
        del self._buffer[:start]
        return frames, closed

    def end(self, *, grace_s: float = 0.0) -> str:
        """Make sure the process and all it started are gone; returns how the process itself ended.

        ``grace_s`` leaves a process that is already ending the time to do so, so that its own exit status is seen.
        """
        self.socket.close()
        if grace_s > 0:
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                _log.debug("scoring process %d still runs %.1f s after it closed its connection", self.process.pid, grace_s)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            _log.debug("scoring process %d had ended by itself", self.process.pid)
        code = self.process.wait(_KILL_WAIT_S)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class RewardPool:
    """Scores responses in ``num_workers`` child processes."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        log_file: Path,
        num_workers: int = 1,
        folder: Path | None = None,
        memory_limit_bytes: int | None = None,
        startup_timeout_s: float = 120.0,
    ) -> None:
        """Start the processes and wait until every reward is loaded in each.

        ``log_file`` receives whatever user code prints; ``folder`` is the job file's, searched first for Function modules;
        ``memory_limit_bytes`` bounds each process's address space. Raises RewardSetupError when a reward cannot be loaded
        or a process is not ready within ``startup_timeout_s``.
        """
        check_rewards(configs)
        if num_workers < 1:
            raise RewardSetupError(f"rewards: num_workers is {num_workers}; it must be at least 1")
        self.timeouts = 0
        """Samples lost to a time limit so far."""
        self.errors = 0
        """Samples lost to a raise, an unusable result or a process that died, so far."""
        self.restarts = 0
        """Processes replaced so far."""
        self._configs = tuple(configs)
        self._log_file = log_file
        self._startup_timeout_s = startup_timeout_s
        self._setup = Setup(
            configs=self._configs, folder=None if folder is None else str(folder.resolve()), memory_limit_bytes=memory_limit_bytes
        )
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        self._idle_deaths = 0
        self._closed = False
        try:
            for _ in range(num_workers):
                self._start_worker()
            self._run(_Round([], []))
        except BaseException:
            self.close()
            raise

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return one result per request, in order.

        A sample that raises, hangs, kills its process or scores no finite number fails alone. Raises RewardSetupError
        when a process cannot be replaced.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("RewardPool.score is already running in another thread; score one batch at a time")
        try:
            if self._closed:
                raise RuntimeError("RewardPool.score was called after close")
            work = _Round([_to_wire(r) for r in requests], [r.sample_id for r in requests])
            self._run(work)
        except BaseException:
            # Interrupted in the middle of a batch: what the processes still send belongs to no one.
            self.close()
            raise
        finally:
            self._lock.release()
        return [r for r in work.results if r is not None]

    def close(self) -> None:
        """End all processes and what they started; may be called twice."""
        self._closed = True
        while self._workers:
            self._remove(self._workers[-1])
        self._selector.close()

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _run(self, work: _Round) -> None:
        """Turn the loop until every worker is ready and every sample has a result."""
        while True:
            for worker in list(self._workers):
                if worker.ready and worker.assignment is None and work.pending:
                    self._assign(worker, work)
            waiting = [w for w in self._workers if not w.ready or w.assignment is not None]
            if not waiting and not work.pending:
                return
            timeout_s = max(0.0, min((w.deadline for w in waiting), default=0.0) - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                self._read(key.data, work)
            now = time.monotonic()
            for worker in [w for w in waiting if w in self._workers and w.deadline <= now]:
                # The result may have come in the moment the limit passed.
                self._read(worker, work)
                if worker in self._workers and worker.deadline <= now and (not worker.ready or worker.assignment is not None):
                    self._out_of_time(worker, work)

    def _assign(self, worker: _Worker, work: _Round) -> None:
        size = min(_MAX_BATCH, max(_MIN_BATCH, math.ceil(len(work.pending) / (2 * len(self._workers)))))
        samples = [work.pending.popleft() for _ in range(min(size, len(work.pending)))]
        if worker.send(pickle.dumps([work.samples[i] for i in samples])):
            worker.assignment = _Assignment(samples)
            worker.deadline = time.monotonic() + self._configs[0].timeout_s
        else:
            work.pending.extendleft(reversed(samples))
            self._gone(worker, work)

    def _read(self, worker: _Worker, work: _Round) -> None:
        frames, closed = worker.receive()
        for frame in frames:
            if not worker.ready:
                if frame[:1] == FAILED:
                    raise RewardSetupError(frame[1:].decode())
                worker.ready = frame[:1] == READY
            elif worker.assignment is not None:
                self._take_result(worker, worker.assignment, frame, work)
        if frames and worker.assignment is not None:
            worker.deadline = time.monotonic() + self._configs[worker.assignment.reward].timeout_s
        if closed:
            self._gone(worker, work)

    def _take_result(self, worker: _Worker, job: _Assignment, frame: bytes, work: _Round) -> None:
        _, number, ok, value, elapsed_s = RESULT.unpack_from(frame)
        config = self._configs[number]
        job.elapsed_s += elapsed_s
        self._idle_deaths = 0
        if ok:
            job.parts[config.name] = value
            if len(frame) > RESULT.size:
                job.parts.update({f"{config.name}/{k}": v for k, v in json.loads(frame[RESULT.size :]).items()})
            job.score += config.weight * value
            if number == 0:
                job.passed = value >= config.pass_threshold
            job.reward = number + 1
            if job.reward < len(self._configs):
                return
            work.finish(job, score=job.score, error=None)
        else:
            self.errors += 1
            work.finish(job, score=None, error=f"reward {config.name!r}: {json.loads(frame[RESULT.size :])}")
        if job.current == len(job.samples):
            worker.assignment = None

    def _out_of_time(self, worker: _Worker, work: _Round) -> None:
        job = worker.assignment
        if job is None:
            raise RewardSetupError(
                f"rewards: a scoring process was not ready within {self._startup_timeout_s:g} s "
                f"(loading {', '.join(c.name for c in self._configs)}); "
                f"its output: {self._log_file}"
            )
        config = self._configs[job.reward]
        self.timeouts += 1
        job.elapsed_s += config.timeout_s
        work.finish(
            job,
            score=None,
            error=f"reward {config.name!r}: ran past its limit of {config.timeout_s:g} s; raise timeout_s or make it faster",
        )
        self._replace(worker, job, work, self._remove(worker))

    def _gone(self, worker: _Worker, work: _Round) -> None:
        """The process has ended or closed its connection: blame the sample in work, if any, and replace it."""
        job = worker.assignment
        ended = self._remove(worker, grace_s=1.0)
        if not worker.ready:
            raise RewardSetupError(f"rewards: a scoring process ended while it loaded its rewards ({ended}); its output: {self._log_file}")
        if job is not None:
            self.errors += 1
            name = self._configs[job.reward].name
            work.finish(job, score=None, error=f"reward {name!r}: its process died ({ended}); its output: {self._log_file}")
        else:
            self._idle_deaths += 1
            if self._idle_deaths > _MAX_IDLE_DEATHS:
                raise RewardSetupError(
                    f"rewards: scoring processes ended {self._idle_deaths} times in a row without work ({ended}); "
                    f"their output: {self._log_file}"
                )
        self._replace(worker, job, work, ended)

    def _replace(self, worker: _Worker, job: _Assignment | None, work: _Round, ended: str) -> None:
        _log.warning("scoring process %d replaced (%s)", worker.process.pid, ended)
        if job is not None:
            work.pending.extendleft(reversed(job.samples[job.current :]))
        self.restarts += 1
        self._start_worker()

    def _start_worker(self) -> None:
        worker = _Worker(self._setup, self._log_file, self._startup_timeout_s)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _remove(self, worker: _Worker, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.end(grace_s=grace_s)


class _Round:
    """The samples of one ``score`` call and what became of them."""

    def __init__(self, samples: list[WireSample], sample_ids: list[str]) -> None:
        self.samples = samples
        self.pending = deque(range(len(samples)))
        self.results: list[RewardResult | None] = [None] * len(samples)
        self._sample_ids = sample_ids

    def finish(self, job: _Assignment, *, score: float | None, error: str | None) -> None:
        """Write down the result of the job's current sample and go on to its next."""
        position = job.samples[job.current]
        self.results[position] = RewardResult(
            sample_id=self._sample_ids[position],
            score=score,
            parts=job.parts,
            passed=job.passed and score is not None,
            error=error,
            elapsed_s=job.elapsed_s,
        )
        job.advance()


def _to_wire(request: RewardRequest) -> WireSample:
    prompt = request.prompt
    return prompt.text, request.response_text, prompt.answer, dict(prompt.metadata)


def _child_env() -> dict[str, str]:
    """Return the child's environment: the parent's, with this package importable, prints unbuffered, one compute thread."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(p for p in (_PACKAGE_ROOT, env.get("PYTHONPATH", "")) if p)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("OMP_NUM_THREADS", "1")
    return env
