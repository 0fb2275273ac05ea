"""What surrounds the real scheduler in the simulation: engines with slots, rewards, a trainer's loop; all of it in virtual seconds.

The engines keep to the worker's protocol (submit, collect, abort) and to nothing else: ``RolloutScheduler``, ``EngineFleet``,
``StalenessGate``
and ``TrajectoryBuffer`` run as they do in a job. :func:`simulate` is the loop of ``rljob_runtime.loop.driver`` with sleeps for the
trainer's work.
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Any, Literal

import numpy as np

from bench.overlap.lengths import MAX_TOKENS, Lengths
from rljob_runtime.job.learning_settings import engine_capacity
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.fleet import FleetConfig
from rljob_runtime.overlap.scheduler import RolloutConfig, RolloutScheduler
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.packed import CompletionBatch, RewardBatch, pack
from rljob_runtime.records import Completion, FloatArray, GenerationRequest, IntArray, Prompt, RewardResult, Sampling, Segment, VersionSpan
from tests.support.virtual_time import run_virtual

UpdateMode = Literal["Drain", "Interrupt", "InFlight"]
DEADLINE_S = 1e6
"""Virtual; no wait of a sound simulation comes near."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One configuration; times are virtual seconds."""

    groups_per_step: int
    samples_per_group: int
    num_engines: int
    slots: int
    """Responses an engine draws at the same time."""
    token_s: float
    """Of one token, whatever else the engine draws."""
    train_s: float
    """Of one step on the trainer."""
    sync_s: float
    """From the end of training until every engine serves the new weights; engines draw nothing meanwhile."""
    recompute_token_s: float
    """Of one token of KV cache, which mode Interrupt computes again before the engine goes on."""
    reward_s: float
    ratio: float
    mode: UpdateMode
    steps: int
    warmup_steps: int
    """Left out of every figure."""

    @property
    def samples_per_step(self) -> int:
        """Q."""
        return self.groups_per_step * self.samples_per_group

    @property
    def total_slots(self) -> int:
        """Of all engines."""
        return self.num_engines * self.slots


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulated run did after its warm-up."""

    step_s: float
    """Mean virtual seconds of a step."""
    step_times_s: list[float]
    staleness: list[int]
    """Per trained group: versions by which its oldest token was behind."""
    token_staleness_mean: float
    trained_groups: list[int]
    """Group numbers by training order, from the first step on."""
    trainer_idle_share: float
    slot_use_share: float
    """Slot-seconds that drew tokens which were trained, over all."""
    dropped_groups: int
    requests: int
    """Responses sampled, warm-up included."""
    scheduler_cpu_s: float
    """Processor time of the whole run without that of the simulated engines: scheduler and event loop."""


@dataclass(slots=True, eq=False)
class _Running:
    request: GenerationRequest
    length: int
    began_work_s: float


class SimEngine:
    """Continuous batching: ``slots`` responses draw a token every ``token_s``, the others wait in the order of submission.

    Its work clock stands still during weight updates, so that ends need not be moved.
    """

    def __init__(self, index: int, world: World, lengths: Lengths) -> None:
        """An engine that serves version 0."""
        self.name = f"engine-{index}"
        self.log_file = ""
        self.cpu_s = 0.0
        """Processor seconds spent here, not in the scheduler."""
        self.sampled_tokens = 0
        self._world = world
        self._lengths = lengths
        self._loop = asyncio.get_running_loop()
        self._running: dict[str, _Running] = {}
        self._ends: list[tuple[float, str]] = []
        self._waiting: deque[GenerationRequest] = deque()
        self._back: list[Completion] = []
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """(work seconds, version) in order."""
        self._stood_s = 0.0
        self._stands_until_s = 0.0

    async def call(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """A call of a worker; the answer of ``collect`` comes when a response ends or the wait is over."""
        if method == "collect":
            return await self._collect(payload)
        began_s = time.thread_time()
        getattr(self, method)(payload)
        self.cpu_s += time.thread_time() - began_s
        return None

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self._waiting.extend(requests)
        self._fill()

    def abort(self, request_ids: Sequence[str]) -> None:
        """Give requests back with what they have."""
        wanted = set(request_ids)
        for request in [r for r in self._waiting if r.request_id in wanted]:
            self._waiting.remove(request)
            self._back.append(_completion(request.request_id, 0, (), "abort"))
        for request_id in request_ids:
            if request_id in self._running:
                self._end(request_id, "abort")
        self._ends = [(end_s, i) for end_s, i in self._ends if i in self._running]
        heapq.heapify(self._ends)
        self._fill()
        self._wake.set()

    def update(self, version: int) -> float:
        """Serve new weights after ``sync_s``; with Interrupt the running responses' caches are computed again.

        Returns the stop in seconds.
        """
        stop_s = self._world.sync_s
        if self._world.mode == "Interrupt":
            tokens = sum(min(int((self._work_s() - r.began_work_s) / self._world.token_s), r.length) for r in self._running.values())
            stop_s += tokens * self._world.recompute_token_s
        work_s = self._work_s()
        self._stands_until_s = self._loop.time() + stop_s
        self._stood_s += stop_s
        self._versions.append((work_s, version))
        self._arm()
        return stop_s

    async def _collect(self, max_wait_s: float) -> CompletionBatch:
        if not self._back:
            self._wake.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._wake.wait()
            except TimeoutError:
                return pack([])
        back, self._back = self._back, []
        return pack(back)

    def _work_s(self) -> float:
        """The work clock: virtual time without stops."""
        now_s = self._loop.time()
        return now_s - self._stood_s + max(self._stands_until_s - now_s, 0.0)

    def _fill(self) -> None:
        """Give free slots to waiting requests."""
        while self._waiting and len(self._running) < self._world.slots:
            request = self._waiting.popleft()
            group, sample = request.request_id.split("+")[0].split("/")
            sampled = MAX_TOKENS - request.sampling.max_tokens
            length = self._lengths.of(int(group), int(sample)) - sampled
            self._running[request.request_id] = _Running(request, length, self._work_s())
            heapq.heappush(self._ends, (self._work_s() + length * self._world.token_s, request.request_id))
        self._arm()

    def _arm(self) -> None:
        """Set the timer to the next end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            now_s = self._loop.time()
            wait_s = max(self._ends[0][0] - self._work_s(), 0.0) + max(self._stands_until_s - now_s, 0.0)
            self._timer = self._loop.call_at(now_s + wait_s, self._step)

    def _step(self) -> None:
        """Responses that end now leave; others take their slots."""
        began_s = time.thread_time()
        now_s = self._work_s() + self._world.token_s / 1000
        while self._ends and self._ends[0][0] <= now_s:
            self._end(heapq.heappop(self._ends)[1], "stop")
        self._fill()
        self._wake.set()
        self.cpu_s += time.thread_time() - began_s

    def _end(self, request_id: str, finish_reason: str) -> None:
        running = self._running.pop(request_id)
        sampled = running.length
        if finish_reason == "abort":
            sampled = min(int((self._work_s() - running.began_work_s) / self._world.token_s), running.length - 1)
        self.sampled_tokens += sampled
        self._back.append(_completion(request_id, sampled, self._spans(running.began_work_s, sampled), finish_reason))

    def _spans(self, began_work_s: float, sampled: int) -> tuple[VersionSpan, ...]:
        """Which version drew which tokens; one that a new version met half-way counts as the new one's."""
        first = bisect.bisect_right(self._versions, (began_work_s, 1 << 60)) - 1
        spans = []
        start, version = 0, self._versions[first][1]
        for work_s, later in self._versions[first + 1 :]:
            end = min(int((work_s - began_work_s) / self._world.token_s), sampled)
            if end > start:
                spans.append(VersionSpan(start=start, end=end, version=version))
            start, version = end, later
        if sampled > start:
            spans.append(VersionSpan(start=start, end=sampled, version=version))
        return tuple(spans)


def _completion(request_id: str, count: int, spans: tuple[VersionSpan, ...], finish_reason: str) -> Completion:
    segment = Segment(token_ids=_tokens(count), sampled=True, logprobs=_logprobs(count), version_spans=spans)
    return Completion(request_id=request_id, segment=segment, finish_reason=finish_reason)


@cache
def _tokens(count: int) -> IntArray:
    return np.full(count, 7, dtype=np.int32)


@cache
def _logprobs(count: int) -> FloatArray:
    return np.full(count, -1.0, dtype=np.float32)


PROMPT: IntArray = np.array([1, 2, 3], dtype=np.int32)


class _Prompts:
    """Prompts 0, 1, 2, ..."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, count: int) -> list[Prompt]:
        first, self._next = self._next, self._next + count
        return [Prompt(index=i, text="", token_ids=PROMPT, answer="", source="simulated") for i in range(first, first + count)]

    def state(self) -> dict[str, object]:
        return {"next": self._next}


def simulate(world: World, lengths: Lengths) -> Outcome:
    """One run, in virtual time.

    Raises:
        AssertionError: the scheduler would hang.
        RuntimeFault: it failed.
    """
    began_s = time.process_time()
    outcome, engine_cpu_s = run_virtual(_run(world, lengths))
    outcome.scheduler_cpu_s = time.process_time() - began_s - engine_cpu_s
    return outcome  # type: ignore[no-any-return]


@dataclass(slots=True)
class _Log:
    """What the trainer's loop saw, by step."""

    ended_s: list[float] = field(default_factory=list)
    taken: list[list[Group]] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    stale: list[list[int]] = field(default_factory=list)
    dropped: int = 0


async def _run(world: World, lengths: Lengths) -> tuple[Outcome, float]:
    async def score(batch: RewardBatch) -> list[RewardResult]:
        if world.reward_s:
            await asyncio.sleep(world.reward_s)
        return [RewardResult(sample_id=name, score=1.0) for name in batch.sample_ids]

    engines = [SimEngine(index, world, lengths) for index in range(world.num_engines)]
    # more groups than are ever trained: at the end of a real run the engines run empty, which is not the steady state asked for
    gate = StalenessGate(
        groups_per_step=world.groups_per_step, async_generation_ratio=world.ratio, max_staleness=ceil(world.ratio), total_groups=1 << 40
    )
    scheduler = RolloutScheduler(
        prompts=_Prompts(),
        engines=engines,  # type: ignore[arg-type]
        score=score,
        gate=gate,
        config=RolloutConfig(
            samples_per_prompt=world.samples_per_group,
            sampling=Sampling(max_tokens=MAX_TOKENS),
            seed=0,
            fleet=fleet_config(world.slots, world.num_engines),
            drains=world.mode == "Drain",
            drain_timeout_s=DEADLINE_S,
        ),
    )
    running = asyncio.create_task(scheduler.run())
    log = _Log()
    scheduler.open()
    for step in range(world.steps):
        await _step(scheduler, engines, world, step, log)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return _outcome(world, log, engines), sum(engine.cpu_s for engine in engines)


def fleet_config(slots: int, num_engines: int) -> FleetConfig:
    """The fleet settings that ``learning_settings.rollout_config`` makes."""
    return FleetConfig(capacities=(engine_capacity(slots),) * num_engines, stall_timeout_s=DEADLINE_S)


async def _step(scheduler: RolloutScheduler, engines: Sequence[SimEngine], world: World, step: int, log: _Log) -> None:
    """Take, train, publish, advance: ``Driver._train`` without what takes no time."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    groups = await scheduler.buffer.take(world.groups_per_step, version=step, timeout_s=DEADLINE_S, what=f"batch of step {step + 1}")
    log.waited_s.append(loop.time() - began_s)
    log.taken.append(groups)
    log.stale.append([step - group.oldest_version for group in groups])
    await asyncio.sleep(world.train_s)
    scheduler.trained(groups)
    async with scheduler.updating(f"weights v{step + 1}"):
        await asyncio.sleep(max(engine.update(step + 1) for engine in engines))
    scheduler.advance(step + 1)
    log.dropped += scheduler.take_counters().groups_dropped
    log.ended_s.append(loop.time())


def _outcome(world: World, log: _Log, engines: Sequence[SimEngine]) -> Outcome:
    first = world.warmup_steps
    window_s = log.ended_s[-1] - log.ended_s[first - 1]
    spans = [
        (step, span)
        for step in range(first, world.steps)
        for group in log.taken[step]
        for trajectory in group.trajectories
        for span in trajectory.version_spans
    ]
    tokens = sum(span.end - span.start for _, span in spans)
    return Outcome(
        step_s=window_s / (world.steps - first),
        step_times_s=[log.ended_s[i] - log.ended_s[i - 1] for i in range(first, world.steps)],
        staleness=[lag for lags in log.stale[first:] for lag in lags],
        token_staleness_mean=sum((step - span.version) * (span.end - span.start) for step, span in spans) / tokens,
        trained_groups=[group.group_id for groups in log.taken for group in groups],
        trainer_idle_share=sum(log.waited_s[first:]) / window_s,
        slot_use_share=tokens * world.token_s / (world.total_slots * window_s),
        dropped_groups=log.dropped,
        requests=sum(len(group.trajectories) for groups in log.taken for group in groups),
        scheduler_cpu_s=0.0,
    )
