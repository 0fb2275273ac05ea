"""The engines as one: requests wait in one line, go to the engine with the least to do, and move on when an engine pauses.

::

    add ──> waiting, oldest group first ── route ──> engine i: submit ... collect ──> owner
               ^        (started ones first)                       │
               └──────────── with the tokens sampled so far ───────┘  abort: the engine pauses, or others are idle, or it is lost

| wait               | for                                 | bounded by             | then                              |
|--------------------|-------------------------------------|------------------------|-----------------------------------|
| pause, reserved    | running responses, then aborted ones| finish_s, timeout_s    | DeadlineError naming the engine   |
| quiet              | all running responses               | timeout_s              | DeadlineError naming engines      |
| collection         | a finished response                 | stall_timeout_s        | DeadlineError naming the engine   |

Engines that pause, or whose worker is lost, do not disturb others: these keep what they run and are given the requests of those that
leave. Several owners can have responses generated (training, validation); each gets its own back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rljob_api.vocabulary import GroupRouting
from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import DeadlineError, WorkerLostError
from rljob_runtime.overlap.occupancy import Occupancy
from rljob_runtime.overlap.routing import AFFINITY_MARGIN, Capacity, places, route, settle, surplus
from rljob_runtime.overlap.samples import Owner, Sample
from rljob_runtime.overlap.waiting import WaitingLine
from rljob_runtime.records import Completion, GenerationRequest

COLLECT_WAIT_S = 1.0
"""Longest silence of one collect call; only decides how soon a stall is noticed."""
CALL_TIMEOUT_S = 60.0
"""Deadline of calls that only hand something over."""
ABORT_TIMEOUT_S = 120.0
"""Deadline of an engine's answer to an abort: it is in the middle of a step at most."""

OnLost = Callable[[int, WorkerLostError], None]
"""Called with the index of an engine that is gone, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """What the fleet needs of the spec."""

    capacities: tuple[Capacity, ...]
    """What each engine takes, by its index; more requests wait here, where they can still go to any engine."""
    stall_timeout_s: float
    affinity_margin: int = AFFINITY_MARGIN
    """0 where engines cache no prefixes."""
    group_routing: GroupRouting = GroupRouting.SPREAD
    survives_engine_loss: bool = True
    """Whether others take over when the worker of an engine is gone; without any other one, and where False, that is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """What became of running requests when engines paused or resumed."""

    elapsed_s: float
    moved: int
    """Requests that were taken from an engine."""
    kept_tokens: int
    """Tokens sampled for them until then."""


@dataclass(slots=True)
class FleetCounts:
    """What happened since the last :meth:`EngineFleet.take_counts`."""

    requests_cancelled: int = 0
    tokens_cancelled: int = 0
    """Sampled tokens of those: lost work."""
    engines_lost: int = 0
    requests_moved: int = 0
    """Taken over from lost engines."""


@dataclass(slots=True, eq=False)
class _Engine:
    index: int
    worker: Worker
    running: dict[str, Sample] = field(default_factory=dict)
    """By the id of the request, in the order of submission."""
    cancelled: set[str] = field(default_factory=set)
    """Those of them that were cancelled meanwhile."""
    open: bool = True
    """Whether it is given requests."""
    lost: bool = False
    serving: asyncio.Task[None] | None = None
    outbox: asyncio.Queue[tuple[str, list[Any]]] = field(default_factory=asyncio.Queue)
    """Submissions and aborts, which must arrive in order."""
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    last_progress_s: float = 0.0
    occupancy: Occupancy = field(kw_only=True)

    def submit(self, samples: Sequence[Sample], requests: list[GenerationRequest]) -> None:
        if not self.running:
            self.last_progress_s = now_s()
        for sample, request in zip(samples, requests, strict=True):
            sample.engine = self.index
            settle(sample.affinity, self.index)
            self.running[request.request_id] = sample
        self.outbox.put_nowait(("submit", requests))
        self.busy.set()
        self.occupancy.change(len(self.running), now_s())

    def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self.outbox.put_nowait(("abort", request_ids))

    def release(self, request_id: str) -> tuple[Sample, bool]:
        """A request is no longer here; its sample, and whether that was cancelled."""
        sample = self.running.pop(request_id)
        self.occupancy.change(len(self.running), now_s())
        sample.affinity.num_there -= sample.affinity.engine == self.index
        cancelled = request_id in self.cancelled
        self.cancelled.discard(request_id)
        return sample, cancelled


class EngineFleet:
    """One per job. ``run`` ends only by cancellation or failure."""

    def __init__(self, engines: Sequence[Worker], *, config: FleetConfig, on_lost: OnLost | None = None) -> None:
        """Wire the parts.

        Args:
            engines: rollout workers.
            config: limits.
            on_lost: called for every engine that is lost while others go on.
        """
        capacities = dict(enumerate(config.capacities))
        self._engines = [
            _Engine(index, worker, occupancy=Occupancy(capacity.slots))
            for index, (worker, capacity) in enumerate(zip(engines, config.capacities, strict=True))
        ]
        self._capacities = capacities
        self._limits = (
            {index: capacity.slots for index, capacity in capacities.items()},
            {index: capacity.slots + capacity.queued for index, capacity in capacities.items()},
        )
        """Requests that each engine is given at first, and as long as so many wait that queueing some there loses nothing."""
        self._config = config
        self._on_lost = on_lost
        self._waiting = WaitingLine()
        self._ended = asyncio.Event()
        """Set whenever an engine gave requests back."""
        self._pauses = 0
        self._moved = 0
        self._kept_tokens = 0
        self._counts = FleetCounts()

    @property
    def num_running(self) -> int:
        """Requests at engines."""
        return sum(len(engine.running) for engine in self._engines)

    @property
    def num_waiting(self) -> int:
        """Requests without an engine."""
        return len(self._waiting)

    @property
    def lost(self) -> frozenset[int]:
        """Engines that are gone permanently."""
        return frozenset(engine.index for engine in self._engines if engine.lost)

    def take_counts(self) -> FleetCounts:
        """Counts since the last call."""
        taken, self._counts = self._counts, FleetCounts()
        return taken

    def take_busy_fraction(self) -> float:
        """Request slots in use over slots since the last call, mean over the engines that are not lost."""
        shares = [engine.occupancy.take(now_s()) for engine in self._engines if not engine.lost]
        return sum(shares) / max(len(shares), 1)

    def add(self, samples: Iterable[Sample]) -> None:
        """Have responses generated; each goes back to its owner once, unless it is cancelled."""
        for sample in samples:
            self._waiting.push(sample)
        self._hand_out()

    def cancel(self, samples: Iterable[Sample]) -> int:
        """Stop generating these without notifying their owner. Those that have ended, or were never added, are ignored. O(samples).

        Returns:
            How many were withdrawn. Tokens that running ones turn out to have are counted when they come back.
        """
        withdrawn: list[Sample] = []
        aborted: dict[int, list[str]] = {}
        for sample in dict.fromkeys(samples):
            if sample in self._waiting:
                self._waiting.withdraw(sample)
                withdrawn.append(sample)
            elif (engine := self._engine_of(sample)) is not None and sample.request_id not in engine.cancelled:
                engine.cancelled.add(sample.request_id)
                aborted.setdefault(engine.index, []).append(sample.request_id)
                withdrawn.append(sample)
        for index, request_ids in aborted.items():
            self._engines[index].abort(request_ids)
        self._counts.requests_cancelled += len(withdrawn)
        self._counts.tokens_cancelled += sum(len(sample.token_ids) for sample in withdrawn)
        return len(withdrawn)

    def lose(self, index: int, error: WorkerLostError) -> None:
        """The worker of an engine is gone: others take its requests over, without the tokens it had not returned yet.

        Raises:
            WorkerLostError: ``error``; there is no other engine, or a loss is not to be survived.
        """
        engine = self._engines[index]
        if engine.lost:
            return
        if not self._config.survives_engine_loss or all(other.lost for other in self._engines if other is not engine):
            raise error
        engine.lost, engine.open = True, False
        if engine.serving is not None and engine.serving is not asyncio.current_task():
            engine.serving.cancel()
        self._counts.engines_lost += 1
        for request_id in list(engine.running):
            sample, cancelled = engine.release(request_id)
            if not cancelled:
                self._counts.requests_moved += 1
                self._waiting.push(sample)
        self._ended.set()
        if self._on_lost is not None:
            self._on_lost(index, error)
        self._hand_out()

    async def run(self) -> None:
        """Hand requests out and collect responses until cancelled.

        Raises:
            ExceptionGroup: of WorkerLostError, the last engine is gone; of DeadlineError, an engine finished nothing for too long.
        """
        self.take_busy_fraction()  # counts from here, not from the clock's zero
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                if not engine.lost:
                    engine.serving = tasks.create_task(self._serve(engine))

    async def pause(self, engines: Collection[int], *, what: str, finish_s: float = 0.0, timeout_s: float = ABORT_TIMEOUT_S) -> FleetChange:
        """Pause engines: they are given nothing more; what they run goes on elsewhere, or waits, with its tokens. Skips lost ones.

        Args:
            engines: by index; those that are paused already stay so.
            what: for messages, such as ``training of step 3``.
            finish_s: how long running responses may take to end before they are moved.
            timeout_s: of the move.

        Raises:
            DeadlineError: an engine did not give its requests back.
        """
        leaving = [self._engines[index] for index in sorted(set(engines))]
        for engine in leaving:
            engine.open = False
        return await self._called_back(leaving, None, what=what, finish_s=finish_s, timeout_s=timeout_s)

    def resume(self, engines: Collection[int]) -> None:
        """Resume engines; overloaded ones give up requests for them."""
        closed = [self._engines[index] for index in sorted(set(engines)) if not self._engines[index].open]
        joining = [engine for engine in closed if not engine.lost]
        if not joining:
            return
        for engine in joining:
            engine.open = True
        loads = {engine.index: len(engine.running) for engine in self._engines if engine.open}
        over = surplus(loads, len(self._waiting), self._capacities)
        for index, count in over.items():
            engine = self._engines[index]
            engine.abort(list(engine.running)[-count:])  # the latest have the fewest tokens, so that least is recomputed
        self._hand_out()

    @asynccontextmanager
    async def quiet(self, *, what: str, timeout_s: float) -> AsyncIterator[None]:
        """No engine runs anything inside the block: what runs is waited for, what waits goes on afterwards.

        Raises:
            DeadlineError: responses did not end in time.
        """
        self._pauses += 1
        try:
            if not await self._until_idle(self._engines, None, timeout_s):
                raise DeadlineError(
                    f"{what}: still running after {timeout_s:.0f} s: {_requests_of(self._engines)}; overlap.updateMode Drain waits for them"
                )
            yield
        finally:
            self._pauses -= 1
            self._hand_out()

    @asynccontextmanager
    async def reserved(
        self, owner: Owner, *, what: str, finish_s: float = 0.0, timeout_s: float = ABORT_TIMEOUT_S
    ) -> AsyncIterator[FleetChange]:
        """Engines run only requests of ``owner`` inside the block; those of others wait with their tokens and go on afterwards.

        Args:
            owner: whose requests go on.
            what: for messages, such as ``validation of weights v3``.
            finish_s: how long running responses of others may take to end before they are called back.
            timeout_s: of an engine's answer to that.

        Raises:
            DeadlineError: an engine did not give requests back.
            ValueError: it is reserved already.
        """
        if self._waiting.only is not None:
            raise ValueError(f"{what}: the engines are reserved already; one reservation has to end before the next begins")
        self._waiting.reserve(owner)
        try:
            yield await self._called_back(self._engines, owner, what=what, finish_s=finish_s, timeout_s=timeout_s)
        finally:
            self._waiting.reserve(None)
            self._hand_out()

    async def _called_back(
        self, engines: Sequence[_Engine], spared: Owner | None, *, what: str, finish_s: float, timeout_s: float
    ) -> FleetChange:
        """Have engines give their requests back, but those of ``spared``."""
        began_s, moved, kept_tokens = now_s(), self._moved, self._kept_tokens
        if not await self._until_idle(engines, spared, finish_s):
            for engine in engines:
                engine.abort([i for i, sample in engine.running.items() if sample.owner is not spared])
            if not await self._until_idle(engines, spared, timeout_s):
                raise DeadlineError(f"{what}: called back, but not returned within {timeout_s:.0f} s: {_requests_of(engines)}")
        return FleetChange(elapsed_s=now_s() - began_s, moved=self._moved - moved, kept_tokens=self._kept_tokens - kept_tokens)

    def _engine_of(self, sample: Sample) -> _Engine | None:
        """The engine that runs it."""
        engine = None if sample.engine is None else self._engines[sample.engine]
        return engine if engine is not None and engine.running.get(sample.request_id) is sample else None

    async def _until_idle(self, engines: Sequence[_Engine], spared: Owner | None, timeout_s: float) -> bool:
        """Whether the engines ran empty in time, but for requests of ``spared``."""
        deadline_s = now_s() + timeout_s
        while any(sample.owner is not spared for engine in engines for sample in engine.running.values()):
            left_s = deadline_s - now_s()
            if left_s <= 0:
                return False
            self._ended.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._ended.wait()
            except TimeoutError:
                return False
        return True

    def _hand_out(self) -> None:
        """Give waiting requests to engines that have room, all of one engine in one call."""
        if self._pauses or not self._waiting:
            return
        config = self._config
        loads = {engine.index: len(engine.running) for engine in self._engines if engine.open}
        shares: dict[int, list[Sample]] = {}
        counts = places(self._waiting.ready, loads, self._capacities)
        for count, limits in zip(counts, self._limits, strict=True):
            taken = self._waiting.pop(count)
            affinity = [sample.affinity for sample in taken] if config.group_routing is GroupRouting.TOGETHER else []
            for group in affinity:
                if group.engine not in loads:
                    group.engine, group.num_there = None, 0
            chosen = route([sample.engine for sample in taken], loads, limits, config.affinity_margin, affinity)
            for sample, index in zip(taken, chosen, strict=True):
                if index is not None:  # always: no more were taken than there is room for
                    shares.setdefault(index, []).append(sample)
                    loads[index] += 1
        for index, share in sorted(shares.items()):
            self._engines[index].submit(share, [sample.owner.request_of(sample) for sample in share])

    async def _serve(self, engine: _Engine) -> None:
        """Exchange requests and responses with an engine until it is lost."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._send_forever(engine))
                tasks.create_task(self._collect_forever(engine))
        except* WorkerLostError as failures:
            lost = failures.exceptions[0]
            if isinstance(lost, WorkerLostError):
                self.lose(engine.index, lost)

    async def _send_forever(self, engine: _Engine) -> None:
        while True:
            method, payload = await engine.outbox.get()
            await engine.worker.call(method, payload, timeout_s=CALL_TIMEOUT_S)

    async def _collect_forever(self, engine: _Engine) -> None:
        while True:
            if not engine.running:
                engine.busy.clear()
                await engine.busy.wait()
            completions = await engine.worker.call("collect", COLLECT_WAIT_S, timeout_s=CALL_TIMEOUT_S)
            if engine.lost:  # others generate these already
                return
            time_s = now_s()
            if completions:
                engine.last_progress_s = time_s
                self._take(engine, completions)
            elif engine.running and time_s - engine.last_progress_s > self._config.stall_timeout_s:
                raise DeadlineError(
                    f"no response of {engine.worker.name} finished for {self._config.stall_timeout_s:.0f} s while {len(engine.running)} "
                    f"were running (spec.rollout.stallTimeoutSeconds); its log: {engine.worker.log_file}"
                )

    def _take(self, engine: _Engine, completions: Sequence[Completion]) -> None:
        """Pass on what has ended; what was aborted waits for another engine, unless it was cancelled."""
        finished: dict[Owner, list[tuple[Sample, Completion]]] = {}
        for part in completions:
            sample, cancelled = engine.release(part.request_id)
            if cancelled:
                self._counts.tokens_cancelled += len(part.token_ids)
                continue
            whole = sample.take(part)
            if whole is not None:
                finished.setdefault(sample.owner, []).append((sample, whole))
                continue
            self._moved += 1
            self._kept_tokens += len(part.token_ids)
            self._waiting.push(sample)
        self._ended.set()
        for owner, ended in finished.items():  # before requests are handed out: it may cancel some of those that wait
            owner.on_finished(ended)
        self._hand_out()


def now_s() -> float:
    """The event loop's clock: monotonic, and virtual in simulations."""
    return asyncio.get_running_loop().time()


def _requests_of(engines: Sequence[_Engine]) -> str:
    return ", ".join(f"{len(engine.running)} requests of {engine.worker.name}" for engine in engines if engine.running)
