"""The scoring processes of rewards that share an isolation: hands out work, watches the clock, replaces what it had to kill.

A single loop over all processes reads results, enforces limits and restarts::

    starting --READY--> idle --batch--> busy --last result--> idle
       |                                 |
       +-- startup deadline: error       +-- limit passed:   that sample again in a fresh process; the second time onTimeout decides
                                         +-- process gone:   onError decides
                                             either way the rest is handed out again, and the process replaced (starting)

The clock of an evaluation starts when the parent reads the result before it, so that a slow parent never shortens a limit.
"""

from __future__ import annotations

import logging
import math
import pickle
import secrets
import selectors
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.rewards.child import NONCE_BYTES, Setup
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.process import Result, ScoringProcess, parse_result
from rljob_runtime.sandbox.process import BrokenProtocolError, UselessProcessError

_log = logging.getLogger(__name__)

_MAX_BATCH = 128
_MIN_BATCH = 16
_MAX_IDLE_DEATHS = 3


@dataclass(slots=True, kw_only=True)
class Tally:
    """What is known of one sample; one container each, because thousands live at once and the garbage collector walks them."""

    scores: dict[str, float] = field(default_factory=dict)
    """By reward."""
    extra: dict[str, float] | None = None
    """Further numbers that rewards gave, if any did."""
    dropped: bool = False
    error: str | None = None
    errors: tuple[str, ...] = ()
    timeouts: tuple[str, ...] = ()
    retries: int = 0
    elapsed_s: float = 0.0

    def failed(self, config: RewardConfig, message: str) -> None:
        """A reward raised, gave no number or lost its process."""
        self.errors += (config.name,)
        self.settle(config, config.on_error, message)

    def settle(self, config: RewardConfig, score: float | None, message: str) -> None:
        """What takes the place of a reward's score; None leaves the sample out."""
        self.error = message
        if score is None:
            self.dropped = True
        else:
            self.scores[config.name] = score


@dataclass(slots=True, kw_only=True)
class Item:
    """A sample and the rewards it still needs."""

    tally: Tally
    sample: tuple[object, ...]
    """(prompt text, response text, answer, metadata)."""
    todo: tuple[int, ...]
    """Positions of rewards."""
    said: Mapping[int, str] = field(default_factory=dict)
    """What judges said, by the position of their reward."""
    retried: int | None = None
    """The reward that ran past its limit once."""


@dataclass(slots=True)
class _Assignment:
    """A batch in a process's hands."""

    items: list[Item]
    current: int = 0
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    """Only results with it are of this batch."""

    @property
    def item(self) -> Item:
        return self.items[self.current]


class Crew:
    """``num_workers`` processes that compute the same rewards."""

    def __init__(
        self, configs: Sequence[RewardConfig], *, log_file: Path, num_workers: int, folder: str | None, startup_timeout_s: float
    ) -> None:
        """Start the processes; ``run`` with nothing waits until they are ready."""
        self.timeouts = 0
        self.errors = 0
        self.restarts = 0
        self.sandbox = ""
        """What keeps the processes in, as they say."""
        self._configs = tuple(configs)
        self._log_file = log_file
        self._startup_timeout_s = startup_timeout_s
        self._setup = Setup(
            configs=self._configs,
            folder=folder,
            memory_bytes=max(config.memory_bytes for config in configs),
            disk_bytes=max(config.disk_bytes for config in configs),
            isolation=configs[0].isolation,
        )
        self._selector = selectors.DefaultSelector()
        self._workers: list[ScoringProcess] = []
        self._assigned: dict[ScoringProcess, _Assignment] = {}
        self._idle_deaths = 0
        self._pending: deque[Item] = deque()
        self._retries: deque[Item] = deque()
        for _ in range(num_workers):
            self._start_worker()

    def run(self, items: Iterable[Item]) -> None:
        """Turn the loop until every process is ready and every item is done.

        Raises:
            RewardSetupError: a process cannot load its rewards, or cannot be replaced.
        """
        self._pending.extend(items)
        while True:
            for worker in list(self._workers):
                if worker.ready and worker not in self._assigned:
                    self._assign(worker)
            waiting = [w for w in self._workers if not w.ready or w in self._assigned]
            if not waiting and not self._pending and not self._retries:
                return
            timeout_s = max(0.0, min((w.deadline for w in waiting), default=0.0) - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                self._read(key.data)
            now = time.monotonic()
            for worker in [w for w in waiting if w in self._workers and w.deadline <= now]:
                # The result may have come in the moment the limit passed.
                self._read(worker)
                if worker in self._workers and worker.deadline <= now and (not worker.ready or worker in self._assigned):
                    self._out_of_time(worker)

    def close(self) -> None:
        """End all processes and what they started; may be called twice."""
        while self._workers:
            self._remove(self._workers[-1])
        self._selector.close()

    def _assign(self, worker: ScoringProcess) -> None:
        self._read(worker)  # what was written, or died, since its last result is not the next sample's fault
        if worker not in self._workers:
            return
        # Each retry came with a fresh process, so that none waits for one that never comes.
        if self._retries and not worker.used:
            items = [self._retries.popleft()]
        elif self._pending:
            size = min(_MAX_BATCH, max(_MIN_BATCH, math.ceil(len(self._pending) / (2 * len(self._workers)))))
            items = [self._pending.popleft() for _ in range(min(size, len(self._pending)))]
        else:
            return
        job = _Assignment(items)
        if worker.send(pickle.dumps((job.nonce, [(item.sample, item.todo, item.said) for item in items]))):
            worker.used = True
            self._assigned[worker] = job
            worker.deadline = time.monotonic() + self._configs[items[0].todo[0]].timeout_s
        else:
            (self._retries if items[0].retried is not None else self._pending).extendleft(reversed(items))
            self._gone(worker)

    def _read(self, worker: ScoringProcess) -> None:
        try:
            frames, closed = worker.receive()
            self.sandbox = worker.sandbox or self.sandbox
            for frame in frames:
                self._take(worker, parse_result(frame))
        except UselessProcessError as error:
            raise RewardSetupError(str(error)) from error
        except BrokenProtocolError as error:
            self._gone(worker, str(error))
            return
        if frames and worker in self._assigned:
            worker.deadline = time.monotonic() + self._configs[self._assigned[worker].item.todo[0]].timeout_s
        if closed:
            self._gone(worker)

    def _take(self, worker: ScoringProcess, result: Result) -> None:
        job = self._assigned.get(worker)
        if job is None or (result.nonce, result.position, result.reward) != (job.nonce, job.current, job.item.todo[0]):
            raise BrokenProtocolError("it wrote a result that no one asked for")
        self._idle_deaths = 0
        config, tally = self._configs[result.reward], job.item.tally
        tally.elapsed_s += result.elapsed_s
        if result.score is not None:
            tally.scores[config.name] = result.score
            if result.extra:
                tally.extra = (tally.extra or {}) | {f"{config.name}/{name}": value for name, value in result.extra.items()}
        else:
            self._failed(tally, config, f"reward {config.name!r}: {result.error}")
        self._advance(job)
        if job.current == len(job.items):
            del self._assigned[worker]

    def _advance(self, job: _Assignment) -> None:
        """Go on to the next reward of a sample, or to the next sample."""
        job.item.todo = () if job.item.tally.dropped else job.item.todo[1:]
        if not job.item.todo:
            job.current += 1

    def _failed(self, tally: Tally, config: RewardConfig, message: str) -> None:
        self.errors += 1
        tally.failed(config, message)

    def _out_of_time(self, worker: ScoringProcess) -> None:
        job = self._assigned.get(worker)
        if job is None:
            raise RewardSetupError(
                f"rewards: a scoring process was not ready within {self._startup_timeout_s:g} s "
                f"(loading {', '.join(c.name for c in self._configs)}); "
                f"its output: {self._log_file}"
            )
        item = job.item
        config = self._configs[item.todo[0]]
        item.tally.elapsed_s += config.timeout_s
        if item.retried != item.todo[0]:
            item.retried = item.todo[0]
            item.tally.retries += 1
            job.current += 1
            self._retries.append(item)
        else:
            self.timeouts += 1
            item.tally.timeouts += (config.name,)
            message = f"reward {config.name!r}: ran past its limit of {config.timeout_s:g} s twice; raise timeoutSeconds or make it faster"
            item.tally.settle(config, config.on_timeout, message)
            self._advance(job)
        self._replace(worker, self._remove(worker), job)

    def _gone(self, worker: ScoringProcess, broken: str = "") -> None:
        """The process has ended or is of no use: blame the sample in work, if any, and replace it."""
        job = self._assigned.get(worker)
        ended = self._remove(worker, grace_s=0.0 if broken else 1.0)
        if not worker.ready:
            raise RewardSetupError(f"rewards: a scoring process ended while it loaded its rewards ({ended}); its output: {self._log_file}")
        if job is not None:
            config = self._configs[job.item.todo[0]]
            why = broken or f"its process died ({ended})"
            self._failed(job.item.tally, config, f"reward {config.name!r}: {why}; its output: {self._log_file}")
            self._advance(job)
        else:
            self._idle_deaths += 1
            if self._idle_deaths > _MAX_IDLE_DEATHS:
                raise RewardSetupError(
                    f"rewards: scoring processes ended {self._idle_deaths} times in a row without work ({ended}); "
                    f"their output: {self._log_file}"
                )
        self._replace(worker, broken or ended, job)

    def _replace(self, worker: ScoringProcess, ended: str, job: _Assignment | None) -> None:
        """Start another one; it, or the others, take what is left of the batch."""
        _log.warning("scoring process %d replaced (%s)", worker.process.pid, ended)
        self._assigned.pop(worker, None)
        if job is not None:
            self._pending.extendleft(reversed(job.items[job.current :]))
        self.restarts += 1
        self._start_worker()

    def _start_worker(self) -> None:
        worker = ScoringProcess(self._setup, self._log_file, self._startup_timeout_s)
        self._workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _remove(self, worker: ScoringProcess, *, grace_s: float = 0.0) -> str:
        self._workers.remove(worker)
        self._selector.unregister(worker.socket)
        return worker.end(grace_s=grace_s)
