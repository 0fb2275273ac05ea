"""Keeps the engines busy: admits prompts under the gate, spreads requests, gathers groups, has them judged.

Generation goes on while rewards are computed and while the trainer works, as far as the gate allows.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import DeadlineError
from rljob_runtime.overlap.buffer import Group, TrajectoryBuffer
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.records import (
    Completion,
    GenerationRequest,
    Prompt,
    RewardRequest,
    RewardResult,
    Sampling,
    Trajectory,
)

COLLECT_WAIT_S = 1.0
"""Longest silence of one collect call; only decides how soon a stall is noticed."""
CALL_TIMEOUT_S = 60.0
"""Deadline of calls that only hand something over."""
MIN_GROUP_SAMPLES = 2
"""A group needs a comparison; smaller ones are dropped and replaced."""

Judge = Callable[[list[RewardRequest]], Awaitable[list[RewardResult]]]


class Prompts(Protocol):
    """An endless supply of prompts whose position can be saved; ``Prompt.index`` grows along it."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""

    def state(self) -> dict[str, object]:
        """Its position, JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a resumed run continues in the order of prompts: everything admitted but not trained is asked again (ONCE)."""

    source_state: Mapping[str, object]
    """Position of the source, at or before the oldest prompt that is not done."""
    done: tuple[int, ...]
    """Indexes of prompts after that position that were trained or dropped already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """What the scheduler needs of the spec."""

    samples_per_prompt: int
    sampling: Sampling
    seed: int
    stall_timeout_s: float


@dataclass(slots=True)
class RolloutCounters:
    """What happened since the last :meth:`RolloutScheduler.take_counters`."""

    tokens: int = 0
    reward_errors: int = 0
    reward_timeouts: int = 0
    groups_dropped: int = 0
    judge_s: float = 0.0
    last_completion_s: float = 0.0
    """time.monotonic of the last finished response."""
    reward_messages: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _OpenGroup:
    group_id: int
    prompt: Prompt
    completions: dict[int, Completion] = field(default_factory=dict)


@dataclass(slots=True)
class _EngineState:
    worker: Worker
    running: dict[str, tuple[int, int]] = field(default_factory=dict)
    """request id -> (group id, sample index)"""
    busy: asyncio.Event = field(default_factory=asyncio.Event)
    last_progress_s: float = 0.0


class RolloutScheduler:
    """One per job. ``run`` ends only by cancellation or failure; failures also reach whoever waits on the buffer."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        decode: Callable[[list[tuple[int, ...]]], list[str]],
        engines: Sequence[Worker],
        judge: Judge,
        gate: StalenessGate,
        config: RolloutConfig,
        next_group_id: int = 0,
        done: Sequence[int] = (),
    ) -> None:
        """Wire the parts.

        Args:
            prompts: where new prompts come from.
            decode: token ids of several responses to texts.
            engines: rollout workers.
            judge: rewards of several responses, in order; a failing sample is a result, not an exception.
            gate: admission.
            config: from the spec.
            next_group_id: continues the numbering after a resume.
            done: ``ResumePoint.done`` of the checkpoint: prompts the source gives again that need no asking.
        """
        self._prompts = prompts
        self._decode = decode
        self._engines = [_EngineState(worker=w) for w in engines]
        self._judge = judge
        self._gate = gate
        self._config = config
        self._next_group_id = next_group_id
        self._done: set[int] = set(done)
        self._positions: deque[tuple[int, Mapping[str, object]]] = deque()
        self._open: dict[int, _OpenGroup] = {}
        self._admitted: dict[int, Prompt] = {}
        self._room = asyncio.Event()
        self._judging: set[asyncio.Task[None]] = set()
        self._judge_failed: asyncio.Future[None] | None = None
        self._counters = RolloutCounters()
        self.buffer = TrajectoryBuffer(self._dropped)

    @property
    def next_group_id(self) -> int:
        """Number of the next group to be admitted."""
        return self._next_group_id

    def resume_point(self) -> ResumePoint:
        """What a checkpoint must remember of the prompts; O(prompts in flight)."""
        oldest = min((p.index for p in self._admitted.values()), default=None)
        if oldest is None:
            self._positions.clear()
            self._done.clear()
            return ResumePoint(source_state=self._prompts.state(), done=())
        while len(self._positions) > 1 and self._positions[1][0] <= oldest:
            self._positions.popleft()
        first, state = self._positions[0]
        self._done = {i for i in self._done if i >= first}
        return ResumePoint(source_state=state, done=tuple(sorted(self._done)))

    def trained(self, groups: Sequence[Group]) -> None:
        """These groups have been trained; they need not be asked again after a resume."""
        for group in groups:
            self._done.add(self._admitted.pop(group.group_id).index)

    def open(self) -> None:
        """The first weights are served: admission begins."""
        self._room.set()

    def advance(self, version: int) -> None:
        """New weights are served by every engine: more groups may be admitted."""
        self._gate.advance(version)
        self._room.set()

    def take_counters(self) -> RolloutCounters:
        """Counters since the last call."""
        taken, self._counters = self._counters, RolloutCounters()
        return taken

    async def run(self) -> None:
        """Admit and collect until cancelled."""
        self._judge_failed = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._admit_forever())
                tasks.create_task(self._watch_judging())
                for engine in self._engines:
                    tasks.create_task(self._collect_forever(engine))
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            await self.buffer.fail(first)
            raise first from failures
        finally:
            for task in self._judging:
                task.cancel()

    async def _admit_forever(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            count = self._gate.capacity
            if count:
                self._gate.admit(count)
                await self._submit(self._next_prompts(count))

    def _next_prompts(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            position = self._prompts.state()
            taken = self._prompts.next(count - len(prompts))
            self._positions.append((taken[0].index, position))
            prompts += [p for p in taken if p.index not in self._done]
        return prompts

    async def _submit(self, prompts: Sequence[Prompt]) -> None:
        shares: list[list[GenerationRequest]] = [[] for _ in self._engines]
        now = time.monotonic()
        for prompt in prompts:
            group_id = self._next_group_id
            self._next_group_id += 1
            self._open[group_id] = _OpenGroup(group_id, prompt)
            self._admitted[group_id] = prompt
            for sample in range(self._config.samples_per_prompt):
                index = min(range(len(self._engines)), key=lambda i: len(self._engines[i].running))
                engine = self._engines[index]
                if not engine.running:
                    engine.last_progress_s = now
                request = GenerationRequest(
                    request_id=f"{group_id}/{sample}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=self._config.sampling,
                    seed=sample_seed(self._config.seed, prompt.index, sample),
                )
                engine.running[request.request_id] = (group_id, sample)
                shares[index].append(request)
        for engine, share in zip(self._engines, shares, strict=True):
            if share:
                await engine.worker.call("submit", share, timeout_s=CALL_TIMEOUT_S)
                engine.busy.set()

    async def _collect_forever(self, engine: _EngineState) -> None:
        while True:
            if not engine.running:
                engine.busy.clear()
                await engine.busy.wait()
            completions = await engine.worker.call("collect", COLLECT_WAIT_S, timeout_s=CALL_TIMEOUT_S)
            now = time.monotonic()
            if completions:
                engine.last_progress_s = now
                self._counters.last_completion_s = now
                self._register(engine, completions)
            elif engine.running and now - engine.last_progress_s > self._config.stall_timeout_s:
                raise DeadlineError(
                    f"no response of {engine.worker.name} finished for {self._config.stall_timeout_s:.0f} s while {len(engine.running)} "
                    f"were running (spec.rollout.stallTimeoutSeconds); its log: {engine.worker.log_file}"
                )

    def _register(self, engine: _EngineState, completions: Sequence[Completion]) -> None:
        finished: list[_OpenGroup] = []
        for completion in completions:
            group_id, sample = engine.running.pop(completion.request_id)
            self._counters.tokens += len(completion.token_ids)
            group = self._open[group_id]
            group.completions[sample] = completion
            if len(group.completions) == self._config.samples_per_prompt:
                finished.append(self._open.pop(group_id))
        if finished:
            task = asyncio.create_task(self._judge_groups(finished))
            self._judging.add(task)
            task.add_done_callback(self._judged)

    def _judged(self, task: asyncio.Task[None]) -> None:
        self._judging.discard(task)
        if not task.cancelled() and (error := task.exception()) and self._judge_failed and not self._judge_failed.done():
            self._judge_failed.set_exception(error)

    async def _watch_judging(self) -> None:
        """Brings a failure of the reward workers into the task group."""
        if self._judge_failed is not None:
            await self._judge_failed

    async def _judge_groups(self, groups: Sequence[_OpenGroup]) -> None:
        samples = [(group, index, group.completions[index]) for group in groups for index in sorted(group.completions)]
        texts = self._decode([c.token_ids for _, _, c in samples])
        started = time.monotonic()
        results = await self._judge(
            [
                RewardRequest(sample_id=c.request_id, prompt=g.prompt, response_text=text, finish_reason=c.finish_reason)
                for (g, _, c), text in zip(samples, texts, strict=True)
            ]
        )
        self._counters.judge_s += time.monotonic() - started
        judged: dict[int, list[Trajectory]] = {g.group_id: [] for g in groups}
        for (group, index, completion), text, result in zip(samples, texts, results, strict=True):
            if result.score is None:
                self._count_failed(result)
                continue
            judged[group.group_id].append(
                Trajectory(
                    group_id=group.group_id,
                    sample_index=index,
                    prompt=group.prompt,
                    response_text=text,
                    completion=completion,
                    reward=result,
                )
            )
        for group_id, kept in judged.items():
            complete = Group(group_id=group_id, trajectories=tuple(kept), failed_samples=self._config.samples_per_prompt - len(kept))
            if len(kept) >= min(MIN_GROUP_SAMPLES, self._config.samples_per_prompt):
                await self.buffer.put(complete)
            else:
                self._dropped(complete)

    def _count_failed(self, result: RewardResult) -> None:
        message = result.error or "no score"
        self._counters.reward_errors += 1
        self._counters.reward_timeouts += "time limit" in message
        self._counters.reward_messages.append(message)

    def _dropped(self, group: Group) -> None:
        """A group that will not be trained: counted, its place given to another prompt."""
        self._done.add(self._admitted.pop(group.group_id).index)
        self._counters.groups_dropped += 1
        self._gate.drop()
        self._room.set()


def sample_seed(job_seed: int, prompt_index: int, sample: int) -> int:
    """Seed of one response: a function of job, prompt and sample, so that a resumed run draws the same tokens."""
    digest = hashlib.blake2b(f"{job_seed}/{prompt_index}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
