"""The engines as one: requests wait in one queue, go to the engine with the least to do, and move on when an engine steps aside.

::

    add ──> waiting, oldest group first ── route ──> engine i: submit ... collect ──> done
               ^        (started ones first)                       │
               └──────────── with the tokens drawn so far ─────────┘  abort: the engine steps aside, or others are idle

| wait               | for                                 | bounded by             | then                              |
|--------------------|-------------------------------------|------------------------|-----------------------------------|
| shrink             | running responses, then aborted ones| finish_s, timeout_s    | DeadlineError naming the engine   |
| quiet              | all running responses               | timeout_s              | DeadlineError naming engines      |
| collection         | a finished response                 | stall_timeout_s        | DeadlineError naming the engine   |

Engines that step aside do not disturb others: these keep what they run and are given the requests of those that leave.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import DeadlineError
from rljob_runtime.overlap.routing import AFFINITY_MARGIN, route, surplus
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.records import Completion, GenerationRequest

COLLECT_WAIT_S = 1.0
"""Longest silence of one collect call; only decides how soon a stall is noticed."""
CALL_TIMEOUT_S = 60.0
"""Deadline of calls that only hand something over."""
ABORT_TIMEOUT_S = 120.0
"""Deadline of an engine's answer to an abort: it is in the middle of a step at most."""

Finished = Callable[[list[tuple[Sample, Completion]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """What the fleet needs of the spec."""

    running_limit: int
    """Requests an engine holds at most; more wait here, where they can still go to another engine."""
    stall_timeout_s: float
    affinity_margin: int = AFFINITY_MARGIN
    """0 where engines cache no prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """What became of running requests when engines stepped aside or came back."""

    elapsed_s: float
    moved: int
    """Requests that were taken from an engine."""
    kept_tokens: int
    """Tokens these had drawn."""


@dataclass(slots=True, eq=False)
class _Engine:
    index: int
    worker: Worker
    running: dict[str, Sample] = field(default_factory=dict)
    """By the id of the request, in the order of submission."""
    open: bool = True
    """Whether it is given requests."""
    outbox: asyncio.Queue[tuple[str, list[Any]]] = field(default_factory=asyncio.Queue)
    """Submissions and aborts, which must arrive in order."""
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    last_progress_s: float = 0.0

    def submit(self, samples: Sequence[Sample], requests: list[GenerationRequest]) -> None:
        if not self.running:
            self.last_progress_s = now_s()
        for sample, request in zip(samples, requests, strict=True):
            sample.home = self.index
            self.running[request.request_id] = sample
        self.outbox.put_nowait(("submit", requests))
        self.busy.set()

    def abort(self, request_ids: list[str]) -> None:
        if request_ids:
            self.outbox.put_nowait(("abort", request_ids))


class EngineFleet:
    """One per job. ``run`` ends only by cancellation or failure."""

    def __init__(
        self,
        engines: Sequence[Worker],
        *,
        config: FleetConfig,
        request_of: Callable[[Sample], GenerationRequest],
        on_finished: Finished,
    ) -> None:
        """Wire the parts.

        Args:
            engines: rollout workers.
            config: limits.
            request_of: what to ask for the next part of a sample.
            on_finished: takes responses that have ended.
        """
        self._engines = [_Engine(index, worker) for index, worker in enumerate(engines)]
        self._config = config
        self._request_of = request_of
        self._on_finished = on_finished
        self._waiting: list[tuple[int, int, int, Sample]] = []
        self._ended = asyncio.Event()
        """Set whenever an engine gave requests back."""
        self._paused = False
        self._moved = 0
        self._kept_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests at engines."""
        return sum(len(engine.running) for engine in self._engines)

    @property
    def num_waiting(self) -> int:
        """Requests without an engine."""
        return len(self._waiting)

    def add(self, samples: Iterable[Sample]) -> None:
        """Have responses drawn; they come back through ``on_finished``, each once."""
        for sample in samples:
            # the most drawn goes on first: it holds up its group and is the costliest to lose
            heapq.heappush(self._waiting, (-len(sample.token_ids), sample.group_id, sample.index, sample))
        self._hand_out()

    async def run(self) -> None:
        """Hand requests out and collect responses until cancelled.

        Raises:
            ExceptionGroup: of WorkerLostError, an engine is gone; of DeadlineError, an engine finished nothing for too long.
        """
        async with asyncio.TaskGroup() as tasks:
            for engine in self._engines:
                tasks.create_task(self._send_forever(engine))
                tasks.create_task(self._collect_forever(engine))

    async def shrink(
        self, engines: Collection[int], *, what: str, finish_s: float = 0.0, timeout_s: float = ABORT_TIMEOUT_S
    ) -> FleetChange:
        """Let engines step aside: they are given nothing more; what they run goes on elsewhere, or waits, with its tokens.

        Args:
            engines: by index; those that are aside already stay so.
            what: for messages, such as ``training of step 3``.
            finish_s: how long running responses may take to end before they are moved.
            timeout_s: of the move.

        Raises:
            DeadlineError: an engine did not give its requests back.
        """
        began_s, moved, kept_tokens = now_s(), self._moved, self._kept_tokens
        leaving = [self._engines[index] for index in sorted(set(engines))]
        for engine in leaving:
            engine.open = False
        if not await self._until_idle(leaving, finish_s):
            for engine in leaving:
                engine.abort(list(engine.running))
            if not await self._until_idle(leaving, timeout_s):
                raise DeadlineError(f"{what}: called back, but not returned within {timeout_s:.0f} s: {_requests_of(leaving)}")
        return FleetChange(elapsed_s=now_s() - began_s, moved=self._moved - moved, kept_tokens=self._kept_tokens - kept_tokens)

    def expand(self, engines: Collection[int]) -> int:
        """Let engines take part again; returns how many requests overloaded ones were told to give up for them."""
        joining = [self._engines[index] for index in sorted(set(engines)) if not self._engines[index].open]
        if not joining:
            return 0
        for engine in joining:
            engine.open = True
        over = surplus({engine.index: len(engine.running) for engine in self._engines if engine.open}, len(self._waiting))
        for index, count in over.items():
            engine = self._engines[index]
            engine.abort(list(engine.running)[-count:])  # the latest have drawn least, so that least is computed again
        self._hand_out()
        return sum(over.values())

    @asynccontextmanager
    async def quiet(self, *, what: str, timeout_s: float) -> AsyncIterator[None]:
        """No engine runs anything inside the block: what runs is waited for, what waits goes on afterwards.

        Raises:
            DeadlineError: responses did not end in time.
        """
        self._paused = True
        try:
            if not await self._until_idle(self._engines, timeout_s):
                raise DeadlineError(
                    f"{what}: still running after {timeout_s:.0f} s: {_requests_of(self._engines)}; overlap.updateMode Drain waits for them"
                )
            yield
        finally:
            self._paused = False
            self._hand_out()

    async def _until_idle(self, engines: Sequence[_Engine], timeout_s: float) -> bool:
        """Whether the engines ran empty in time."""
        deadline_s = now_s() + timeout_s
        while any(engine.running for engine in engines):
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
        if self._paused or not self._waiting:
            return
        loads = {engine.index: len(engine.running) for engine in self._engines if engine.open}
        room = sum(max(self._config.running_limit - load, 0) for load in loads.values())
        taken = [heapq.heappop(self._waiting)[-1] for _ in range(min(room, len(self._waiting)))]
        chosen = route([sample.home for sample in taken], loads, self._config.running_limit, self._config.affinity_margin)
        shares: dict[int | None, list[Sample]] = {}
        for sample, index in zip(taken, chosen, strict=True):
            shares.setdefault(index, []).append(sample)
        for engine in self._engines:
            share = shares.get(engine.index)
            if share:
                engine.submit(share, [self._request_of(sample) for sample in share])

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
        """Pass on what has ended; what was aborted waits for another engine."""
        finished: list[tuple[Sample, Completion]] = []
        for part in completions:
            sample = engine.running.pop(part.request_id)
            whole = sample.take(part)
            if whole is not None:
                finished.append((sample, whole))
                continue
            self._moved += 1
            self._kept_tokens += len(part.token_ids)
            heapq.heappush(self._waiting, (-len(sample.token_ids), sample.group_id, sample.index, sample))
        self._ended.set()
        self._hand_out()
        if finished:
            self._on_finished(finished)


def now_s() -> float:
    """The event loop's clock: monotonic, and virtual in simulations."""
    return asyncio.get_running_loop().time()


def _requests_of(engines: Sequence[_Engine]) -> str:
    return ", ".join(f"{len(engine.running)} requests of {engine.worker.name}" for engine in engines if engine.running)
