"""The engines as one: requests wait in one line, go to the engine with the least to do, and move on when an engine pauses.

::

    add ──> waiting, oldest group first ── route ──> engine i: submit ... collect ──> owner
               ^        (started ones first)                       │
               └──────────── with the tokens sampled so far ───────┘  abort: the engine pauses, or others are idle
                                                                      salvage: it is lost

| wait               | for                                 | bounded by             | then                              |
|--------------------|-------------------------------------|------------------------|-----------------------------------|
| pause, reserved    | running responses, then aborted ones| finish_s, timeout_s    | DeadlineError naming the engine   |
| quiet              | all running responses               | timeout_s              | DeadlineError naming engines      |
| a lost engine      | its replacement (`rejoin`)          | the supervisor's       | `give_up`: the others go on       |

Engines that pause, or are lost, do not disturb others: these keep what they run and are given the requests of those that leave; without
any other these wait for the replacement. When an engine is lost is :mod:`.fleet_engine`'s business. Several owners can have responses
generated (training, validation); each gets its own back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rljob_api.vocabulary import GroupRouting
from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import DeadlineError, RuntimeFault, WorkerLostError
from rljob_runtime.overlap.fleet_engine import FleetEngine, now_s
from rljob_runtime.overlap.portions import Portions
from rljob_runtime.overlap.routing import AFFINITY_MARGIN, CacheAffinity, Capacity, Router, places, surplus
from rljob_runtime.overlap.samples import Owner, Sample
from rljob_runtime.overlap.waiting import WaitingLine
from rljob_runtime.packed import CompletionBatch, unpack
from rljob_runtime.records import Completion

MEAN_OVER = 256
"""Responses that the mean length is taken over."""
RESPONSES_AT_ONCE = 64
"""In one pass of the event loop: some 5 ms of its time, whatever many engines return at the same moment."""
MESSAGES_AT_ONCE = 16
"""Submissions and aborts in one pass of the event loop: each lets other threads in, and what is handed out meanwhile goes along with the
next ones."""
ABORT_TIMEOUT_S = 120.0
"""Deadline of an engine's answer to an abort: it is in the middle of a step at most."""

OnLost = Callable[[int, WorkerLostError], bool]
"""Called with the index of an engine that is lost, and how; True where it will be replaced."""


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
    """Whether others take over from an engine that is not replaced; without any other one, and where False, its loss is an error."""


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
    tokens_kept: int = 0
    """Sampled tokens that lost engines still gave back."""
    history_tokens_kept: int = 0
    """Tokens of requests that went to the engine that has them cached."""
    history_tokens_moved: int = 0
    """Those of requests that went to another engine, which computes them again."""


class EngineFleet:
    """One per job. ``run`` ends only by cancellation or failure."""

    def __init__(self, engines: Sequence[Worker], *, config: FleetConfig, on_lost: OnLost | None = None) -> None:
        """Wire the parts.

        Args:
            engines: rollout workers.
            config: limits.
            on_lost: called for every engine that is lost; without it none is replaced.
        """
        capacities = dict(enumerate(config.capacities))
        sends = Portions(MESSAGES_AT_ONCE)
        self._engines = [
            FleetEngine(index, worker, capacity.slots, sends)
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
        self._portions = Portions(RESPONSES_AT_ONCE)
        self._ended = asyncio.Event()
        """Set whenever an engine gave requests back."""
        self._serving = False
        """Whether each engine has its task, which looks after what it runs."""
        self._pauses = 0
        self._moved = 0
        self._kept_tokens = 0
        self._counts = FleetCounts()
        self._num_ended = 0
        self._mean_tokens = math.inf
        """Sampled tokens of a response, over the last ``MEAN_OVER`` or so; none has ended yet: longer than any history."""

    @property
    def num_running(self) -> int:
        """Requests at engines."""
        return sum(len(engine.running) for engine in self._engines)

    @property
    def num_waiting(self) -> int:
        """Requests without an engine."""
        return len(self._waiting)

    @property
    def send_passes(self) -> int:
        """Passes of the event loop until every engine has been sent what was handed out to all at one time."""
        return -(-len(self._engines) // MESSAGES_AT_ONCE)

    @property
    def is_receiving(self) -> bool:
        """Whether responses that engines have returned are taken right now, one portion in each pass of the event loop."""
        return not self._portions.is_idle

    @property
    def lost(self) -> frozenset[int]:
        """Engines that are lost and not replaced."""
        return frozenset(engine.index for engine in self._engines if engine.gone)

    @property
    def serves(self) -> bool:
        """Whether there is an engine that could be given requests."""
        return any(engine.loss is None for engine in self._engines)

    def take_counts(self) -> FleetCounts:
        """Counts since the last call."""
        taken, self._counts = self._counts, FleetCounts()
        return taken

    def queue_metrics(self) -> dict[str, float]:
        """How many requests are at engines and how many wait for one, now."""
        return {"rollout/requests_running": float(self.num_running), "rollout/requests_waiting": float(self.num_waiting)}

    def take_busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """By engine, from when to when it had requests since the last call; readings of the event loop's clock."""
        return {engine.worker.name: engine.busy_spans.take(now_s()) for engine in self._engines}

    def take_busy_fraction(self) -> float:
        """Request slots in use over slots since the last call, mean over the engines that are not lost."""
        shares = [engine.occupancy.take(now_s()) for engine in self._engines if not engine.gone]
        return sum(shares) / max(len(shares), 1)

    def add(self, samples: Iterable[Sample]) -> None:
        """Have responses generated; each goes back to its owner once, unless it is cancelled."""
        for sample in samples:
            self._wait(sample)
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
        self._counts.tokens_cancelled += sum(sample.num_sampled for sample in withdrawn)
        return len(withdrawn)

    def lose(self, index: int, error: WorkerLostError) -> None:
        """An engine is lost, as anybody may find out: others take its requests over, or these wait for its replacement.

        Raises:
            WorkerLostError: ``error``; it is not replaced, and there is no other engine, or a loss is not to be survived.
        """
        engine = self._engines[index]
        if engine.loss is not None:
            return
        comes_back = self._on_lost is not None and self._on_lost(index, error)
        if not comes_back:
            self._check_survivable(engine, error)
        engine.lose(error, comes_back=comes_back)
        self._counts.engines_lost += 1
        if not self._serving:
            self._take_back(engine)

    async def released(self, index: int) -> None:
        """Wait until a lost engine has given back what it could; its process may be ended then. Bounded by SALVAGE_TIMEOUT_S."""
        await self._engines[index].released.wait()

    def give_up(self, index: int, error: RuntimeFault) -> None:
        """A lost engine will not be replaced after all.

        Raises:
            RuntimeFault: ``error``; there is no other engine, or a loss is not to be survived.
        """
        self._check_survivable(self._engines[index], error)
        self._engines[index].comes_back = False

    def rejoin(self, index: int) -> None:
        """A replacement of a lost engine serves the weights of the others; paused it stays, where it was."""
        engine = self._engines[index]
        engine.rejoin()
        self._forget(engine)
        if engine.open:
            self._relieve()

    def _check_survivable(self, engine: FleetEngine, error: RuntimeFault) -> None:
        if not self._config.survives_engine_loss or all(other.gone for other in self._engines if other is not engine):
            raise error

    async def run(self) -> None:
        """Hand requests out and collect responses until cancelled.

        Raises:
            ExceptionGroup: of WorkerLostError, the last engine is lost and not replaced.
        """
        self.take_busy_fraction()  # counts from here, not from the clock's zero
        self._serving = True
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._serve(engine))

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
            engine.paused = True
        return await self._called_back(leaving, None, what=what, finish_s=finish_s, timeout_s=timeout_s)

    def forget_prefixes(self) -> None:
        """Weights changed: what engines have cached serves no request from now on."""
        for engine in self._engines:
            self._forget(engine)

    def resume(self, engines: Collection[int]) -> None:
        """Resume engines, which may have given up their cache meanwhile; overloaded ones give up requests for them."""
        joining = [self._engines[index] for index in sorted(set(engines)) if self._engines[index].paused]
        for engine in joining:
            engine.paused = False
            self._forget(engine)
        if any(engine.open for engine in joining):
            self._relieve()

    def _relieve(self) -> None:
        """Engines joined: overloaded ones give up requests for them."""
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
        self, engines: Sequence[FleetEngine], spared: Owner | None, *, what: str, finish_s: float, timeout_s: float
    ) -> FleetChange:
        """Have engines give their requests back, but those of ``spared``."""
        began_s, moved, kept_tokens = now_s(), self._moved, self._kept_tokens
        if not await self._until_idle(engines, spared, finish_s):
            for engine in engines:
                engine.abort([i for i, sample in engine.running.items() if sample.owner is not spared])
            if not await self._until_idle(engines, spared, timeout_s):
                raise DeadlineError(f"{what}: called back, but not returned within {timeout_s:.0f} s: {_requests_of(engines)}")
        return FleetChange(elapsed_s=now_s() - began_s, moved=self._moved - moved, kept_tokens=self._kept_tokens - kept_tokens)

    def _engine_of(self, sample: Sample) -> FleetEngine | None:
        """The engine that runs it."""
        engine = None if sample.engine is None else self._engines[sample.engine]
        return engine if engine is not None and engine.running.get(sample.request_id) is sample else None

    async def _until_idle(self, engines: Sequence[FleetEngine], spared: Owner | None, timeout_s: float) -> bool:
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
        loads = {engine.index: len(engine.running) for engine in self._engines if engine.open}
        shares: dict[int, list[Sample]] = {}
        counts = places(self._waiting.ready, loads, self._capacities)
        for count, limits in zip(counts, self._limits, strict=True):
            router = Router(loads, limits, margin=self._config.affinity_margin, request_tokens=self._mean_tokens)
            for sample, index in self._placed(count, router):
                shares.setdefault(index, []).append(sample)
        begun_s = now_s()
        for index, share in sorted(shares.items()):
            for sample in share:
                sample.begun_s = sample.begun_s if sample.attempts else begun_s
            self._engines[index].submit(share, [sample.owner.request_of(sample) for sample in share])

    def _placed(self, count: int, router: Router) -> list[tuple[Sample, int]]:
        """Requests for ``count`` free places, and their engines. Those that should wait for their preferred engine are passed by."""
        placed: list[tuple[Sample, int]] = []
        passed_by: set[int | None] = set()
        while len(placed) < count and (sample := self._waiting.first(passed_by)) is not None:
            affinity = self._affinity(sample)
            group = sample.affinity if self._config.group_routing is GroupRouting.TOGETHER else None
            index = router.place(affinity, group, waiting_there=0 if affinity is None else self._waiting.num_preferring(affinity.engine))
            if index is None:
                assert affinity is not None  # otherwise there was no room, and count counts that
                passed_by.add(affinity.engine)
                continue
            self._waiting.withdraw(sample)
            placed.append((sample, index))
            if affinity is not None:
                self._counts.history_tokens_kept += affinity.tokens * (index == affinity.engine)
                self._counts.history_tokens_moved += affinity.tokens * (index != affinity.engine)
        return placed

    def _forget(self, engine: FleetEngine) -> None:
        engine.forget()
        self._waiting.forget_preferred(engine.index)

    def _wait(self, sample: Sample) -> None:
        """Have it wait for an engine."""
        affinity = self._affinity(sample)
        self._waiting.push(sample, None if affinity is None else affinity.engine)

    def _affinity(self, sample: Sample) -> CacheAffinity | None:
        """Where its beginning is cached."""
        if not self._config.affinity_margin or sample.engine is None or not sample.held_tokens:
            return None
        if self._engines[sample.engine].cache is not sample.cache:
            return None
        return CacheAffinity(engine=sample.engine, tokens=sample.held_tokens)

    async def _serve(self, engine: FleetEngine) -> None:
        """Exchange requests and responses with an engine, and with each one that replaces it."""
        while True:
            if engine.loss is None:
                self.lose(engine.index, await engine.exchange(self._receive, self._config.stall_timeout_s))
            self._take(engine, await engine.salvage(), salvaged=True)
            self._take_back(engine)
            await engine.returned.wait()

    async def _receive(self, engine: FleetEngine, answer: CompletionBatch) -> None:
        """Take what an engine returned, in portions, so that the loop's passes stay short."""
        completions: list[Completion] = []
        for first in range(0, len(answer.request_ids), RESPONSES_AT_ONCE):
            await self._portions.turn(min(len(answer.request_ids) - first, RESPONSES_AT_ONCE))
            completions = completions or unpack(answer)
            self._take(engine, completions[first : first + RESPONSES_AT_ONCE])

    def _take_back(self, engine: FleetEngine) -> None:
        """What a lost engine ran waits, with the tokens that came back from it."""
        for request_id in list(engine.running):
            sample, cancelled = engine.release(request_id)
            if not cancelled:
                self._counts.requests_moved += 1
                self._wait(sample)
        engine.released_some()
        engine.released.set()
        self._ended.set()
        self._hand_out()

    def _take(self, engine: FleetEngine, completions: Sequence[Completion], *, salvaged: bool = False) -> None:
        """Pass on what has ended; what was aborted, or ``salvaged`` half-way, waits for another engine, unless it was cancelled."""
        finished: dict[Owner, list[tuple[Sample, Completion]]] = {}
        for part in completions:
            sample, cancelled = engine.release(part.request_id)
            if cancelled:
                self._counts.tokens_cancelled += len(part.segment)
                continue
            whole = sample.take(part)
            if whole is not None:
                self._num_ended += 1
                so_far = self._mean_tokens if self._num_ended > 1 else 0.0
                self._mean_tokens = so_far + (max(len(whole.segment), 1) - so_far) / min(self._num_ended, MEAN_OVER)
                finished.setdefault(sample.owner, []).append((sample, whole))
                continue
            if salvaged:
                self._counts.requests_moved += 1
                self._counts.tokens_kept += len(part.segment)
            else:
                self._moved += 1
                self._kept_tokens += len(part.segment)
            self._wait(sample)
        engine.released_some()
        self._ended.set()
        for owner, ended in finished.items():  # before requests are handed out: it may cancel some of those that wait
            owner.on_finished(ended)
        self._hand_out()


def _requests_of(engines: Sequence[FleetEngine]) -> str:
    return ", ".join(f"{len(engine.running)} requests of {engine.worker.name}" for engine in engines if engine.running)
