"""Keeps the engines busy: admits prompts under the gate, gathers groups, has them scored.

Generation goes on while rewards are computed and while the trainer works, as far as the gate allows.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import FilteredOutError
from rljob_runtime.overlap.buffer import Group, TrajectoryBuffer
from rljob_runtime.overlap.filters import GroupFilter
from rljob_runtime.overlap.fleet import EngineFleet, FleetChange, FleetConfig, OnLost, now_s
from rljob_runtime.overlap.routing import GroupAffinity
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.overlap.staleness import GroupVersions, StalenessGate
from rljob_runtime.records import Completion, GenerationRequest, Prompt, RewardRequest, RewardResult, Sampling, Trajectory

MIN_GROUP_SAMPLES = 2
"""A group needs a comparison; smaller ones are dropped and replaced."""
PRIORITY = 1
"""Validation has a lower one: it is short and should soon report how good some weights are."""

ScoreResponses = Callable[[list[RewardRequest]], Awaitable[list[RewardResult]]]


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
    fleet: FleetConfig
    drains: bool = False
    """Whether running responses are waited for before weights change or engines pause; else they go on afterwards."""
    drain_timeout_s: float = 3600.0
    redundant_samples: int = 0
    """Further requests per prompt; the first ``samples_per_prompt`` that end are the group, the rest is cancelled."""
    group_filter: GroupFilter | None = None
    """Which scored groups are worth training on; others are replaced by the next prompt."""
    max_filtered_in_row: int = 1000
    """So many filtered groups without one that was kept are an error, not bad luck."""


@dataclass(slots=True)
class RolloutCounters:
    """What happened since the last :meth:`RolloutScheduler.take_counters`."""

    tokens: int = 0
    reward_errors: Counter[str] = field(default_factory=Counter)
    """By reward: evaluations that failed other than by time."""
    reward_timeouts: Counter[str] = field(default_factory=Counter)
    """By reward: evaluations that ran past their limit twice."""
    reward_retries: int = 0
    rewards_dropped: int = 0
    """Samples left out because of either."""
    groups_dropped: int = 0
    """Too few rewards, or too old when the trainer would have taken them."""
    groups_filtered: int = 0
    groups_cancelled: int = 0
    """Still being generated when they had become too stale."""
    requests_cancelled: int = 0
    """Requests of cancelled groups, and redundant ones."""
    tokens_cancelled: int = 0
    """Sampled for nothing: by these, and by the finished responses of cancelled groups."""
    engines_lost: int = 0
    reward_s: float = 0.0
    last_completion_s: float = 0.0
    """Clock of the event loop at the last finished response."""
    reward_messages: list[str] = field(default_factory=list)
    engine_pause_s: float = 0.0
    requests_moved: int = 0
    """Taken from engines that paused or were lost, or that others relieved."""
    tokens_kept: int = 0
    """Tokens of those, which are not sampled again."""


@dataclass(slots=True)
class _OpenGroup:
    group_id: int
    prompt: Prompt
    samples: list[Sample]
    completions: dict[int, Completion] = field(default_factory=dict)


class RolloutScheduler:
    """One per job. ``run`` ends only by cancellation or failure; failures also reach whoever waits on the buffer."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        decode: Callable[[list[tuple[int, ...]]], list[str]],
        engines: Sequence[Worker],
        score: ScoreResponses,
        gate: StalenessGate,
        config: RolloutConfig,
        next_group_id: int = 0,
        done: Sequence[int] = (),
        on_lost: OnLost | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            prompts: where new prompts come from.
            decode: token ids of several responses to texts.
            engines: rollout workers.
            score: rewards of several responses, in order; a failing sample is a result, not an exception.
            gate: admission, and how old what is trained may be.
            config: from the spec.
            next_group_id: continues the numbering after a resume.
            done: ``ResumePoint.done`` of the checkpoint: prompts the source gives again that need no asking.
            on_lost: called for every engine that is lost while others go on.
        """
        self._prompts = prompts
        self._decode = decode
        self._score = score
        self.gate = gate
        self.config = config
        self._next_group_id = next_group_id
        self._done: set[int] = set(done)
        self._newest = -1
        """Index of the last prompt that the source gave."""
        self._positions: deque[tuple[int, Mapping[str, object]]] = deque()
        self._open: dict[int, _OpenGroup] = {}
        self._admitted: dict[int, Prompt] = {}
        self._started = GroupVersions()
        """Of groups that are not in the buffer yet."""
        self._room = asyncio.Event()
        self._scoring: set[asyncio.Task[None]] = set()
        self._scoring_failed: asyncio.Future[None] | None = None
        self._counters = RolloutCounters()
        self._filtered_in_row: list[float] = []
        """Mean scores of the groups filtered since one was kept."""
        self.fleet = EngineFleet(engines, config=config.fleet, on_lost=on_lost)
        self.buffer = TrajectoryBuffer(gate=gate, unfinished=self._started, on_drop=lambda group: self._drop(group.group_id))

    @property
    def priority(self) -> int:
        """Priority of its requests."""
        return PRIORITY

    @property
    def next_group_id(self) -> int:
        """Number of the next group to be admitted."""
        return self._next_group_id

    def resume_point(self) -> ResumePoint:
        """What a checkpoint must remember of the prompts; O(prompts in flight)."""
        oldest = min((p.index for p in self._admitted.values()), default=None)
        if oldest is None:
            self._positions.clear()
            self._done = {i for i in self._done if i > self._newest}  # a resumed source has yet to pass these
            return ResumePoint(source_state=self._prompts.state(), done=tuple(sorted(self._done)))
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
        self.gate.advance(version)
        self._cancel_too_stale(version)
        self._room.set()

    def take_counters(self) -> RolloutCounters:
        """Counters since the last call."""
        taken, self._counters = self._counters, RolloutCounters()
        fleet = self.fleet.take_counts()
        return replace(
            taken,
            requests_cancelled=taken.requests_cancelled + fleet.requests_cancelled,
            tokens_cancelled=taken.tokens_cancelled + fleet.tokens_cancelled,
            engines_lost=fleet.engines_lost,
            requests_moved=taken.requests_moved + fleet.requests_moved,
        )

    async def run(self) -> None:
        """Admit and collect until cancelled."""
        self._scoring_failed = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._admit_forever())
                tasks.create_task(self._watch_scoring())
                tasks.create_task(self.fleet.run())
        except BaseExceptionGroup as failures:
            first: BaseException = failures
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self.buffer.fail(first)
            raise first from failures
        finally:
            for task in self._scoring:
                task.cancel()

    async def pause(self, engines: Collection[int], what: str, *, at_once: bool = False) -> None:
        """Pause engines; returns when they run nothing. The others go on.

        Args:
            engines: by index.
            what: for messages.
            at_once: also where running responses would end first.

        Raises:
            DeadlineError: an engine did not give its requests back.
        """
        finish_s = self.config.drain_timeout_s if self.config.drains and not at_once else 0.0
        self._count_change(await self.fleet.pause(engines, what=what, finish_s=finish_s))

    def resume(self, engines: Collection[int]) -> None:
        """Resume engines."""
        self.fleet.resume(engines)

    @asynccontextmanager
    async def updating(self, what: str) -> AsyncIterator[None]:
        """Weights may change inside the block. What would be too old under the next ones is given up before, not recomputed for them.

        Raises:
            DeadlineError: responses that are to end before did not.
        """
        self._cancel_too_stale(self.gate.version + 1)
        if not self.config.drains:
            yield
            return
        async with self.fleet.quiet(what=what, timeout_s=self.config.drain_timeout_s):
            yield

    def _count_change(self, change: FleetChange) -> None:
        self._counters.engine_pause_s += change.elapsed_s
        self._counters.requests_moved += change.moved
        self._counters.tokens_kept += change.kept_tokens

    async def _admit_forever(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            count = self.gate.capacity
            if count:
                self.gate.admit(count)
                self._submit(self._next_prompts(count))

    def _next_prompts(self, count: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < count:
            position = self._prompts.state()
            taken = self._prompts.next(count - len(prompts))
            self._positions.append((taken[0].index, position))
            self._newest = taken[-1].index
            prompts += [p for p in taken if p.index not in self._done]
        return prompts

    def _submit(self, prompts: Sequence[Prompt]) -> None:
        samples = []
        for prompt in prompts:
            group_id = self._next_group_id
            self._next_group_id += 1
            count = self.config.samples_per_prompt + self.config.redundant_samples
            affinity = GroupAffinity()
            made = [Sample(owner=self, group_id=group_id, index=index, prompt=prompt, affinity=affinity) for index in range(count)]
            self._open[group_id] = _OpenGroup(group_id, prompt, made)
            self._admitted[group_id] = prompt
            samples += made
        self.fleet.add(samples)

    def request_of(self, sample: Sample) -> GenerationRequest:
        """The next part of a sample; its first one starts its group."""
        self._started.add(sample.group_id, self.gate.version)
        return sample.request(self.config.sampling, self.config.seed)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        """Gather responses; groups that are complete are scored."""
        self._counters.last_completion_s = now_s()
        complete: list[_OpenGroup] = []
        for sample, completion in finished:
            self._counters.tokens += len(completion.token_ids)
            group = self._open.get(sample.group_id)
            if group is None:  # its group was complete, or given up, by a response that ended together with this one
                self._counters.requests_cancelled += 1
                self._counters.tokens_cancelled += len(completion.token_ids)
                continue
            group.completions[sample.index] = completion
            if len(group.completions) == self.config.samples_per_prompt:
                complete.append(self._open.pop(sample.group_id))
                if self.config.redundant_samples:
                    self.fleet.cancel(group.samples)
        if complete:
            task = asyncio.create_task(self._score_groups(complete))
            self._scoring.add(task)
            task.add_done_callback(self._scored)

    def _scored(self, task: asyncio.Task[None]) -> None:
        self._scoring.discard(task)
        if not task.cancelled() and (error := task.exception()) and self._scoring_failed and not self._scoring_failed.done():
            self._scoring_failed.set_exception(error)

    async def _watch_scoring(self) -> None:
        """Brings a failure of the reward workers into the task group."""
        if self._scoring_failed is not None:
            await self._scoring_failed

    async def _score_groups(self, groups: Sequence[_OpenGroup]) -> None:
        samples = [(group, index, group.completions[index]) for group in groups for index in sorted(group.completions)]
        texts = self._decode([c.token_ids for _, _, c in samples])
        started = now_s()
        results = await self._score(
            [
                RewardRequest(sample_id=c.request_id, prompt=g.prompt, response_text=text, finish_reason=c.finish_reason)
                for (g, _, c), text in zip(samples, texts, strict=True)
            ]
        )
        self._counters.reward_s += now_s() - started
        scored: dict[int, list[Trajectory]] = {g.group_id: [] for g in groups}
        for (group, index, completion), text, result in zip(samples, texts, results, strict=True):
            self._count_problems(result)
            if result.score is None:
                continue
            scored[group.group_id].append(
                Trajectory(
                    group_id=group.group_id,
                    sample_index=index,
                    prompt=group.prompt,
                    response_text=text,
                    completion=completion,
                    reward=result,
                )
            )
        for group_id, kept in scored.items():
            self._sort_out(group_id, kept)

    def _sort_out(self, group_id: int, kept: Sequence[Trajectory]) -> None:
        """Keep a scored group for the trainer, or replace it."""
        scores = [t.reward.score for t in kept if t.reward.score is not None]
        if len(scores) < min(MIN_GROUP_SAMPLES, self.config.samples_per_prompt):
            self._drop(group_id)
        elif self.config.group_filter is not None and not self.config.group_filter.keeps(scores):
            self._counters.groups_filtered += 1
            self._filtered_in_row.append(sum(scores) / len(scores))
            self._check_filter(self.config.group_filter)
            self._release(group_id)
        else:
            self._filtered_in_row.clear()
            self._started.discard(group_id)
            failed = self.config.samples_per_prompt - len(kept)
            self.buffer.put(Group(group_id=group_id, trajectories=tuple(kept), failed_samples=failed))

    def _check_filter(self, group_filter: GroupFilter) -> None:
        """Raises FilteredOutError where nothing seems to pass."""
        if len(self._filtered_in_row) >= self.config.max_filtered_in_row:
            means = ", ".join(f"{mean:.3g}" for mean in self._filtered_in_row[-5:])
            raise FilteredOutError(
                f"{len(self._filtered_in_row)} groups in a row were filtered: kept is {group_filter}, their last mean scores are {means}; "
                "give prompts that are neither too easy nor too hard for the model, loosen the filter, or allow more in a row"
            )

    def _count_problems(self, result: RewardResult) -> None:
        """What failed in scoring, whether or not a score took its place."""
        self._counters.reward_errors.update(result.errors)
        self._counters.reward_timeouts.update(result.timeouts)
        self._counters.reward_retries += result.retries
        self._counters.rewards_dropped += result.score is None
        if result.error is not None:
            self._counters.reward_messages.append(result.error)

    def _cancel_too_stale(self, version: int) -> None:
        """Give up groups that are still being generated and would be too stale for a batch trained from ``version``."""
        started = {group_id: self._started.get(group_id) for group_id in self._open}
        for group in [self._open[i] for i, v in started.items() if v is not None and self.gate.too_stale(v, version)]:
            del self._open[group.group_id]
            self.fleet.cancel(group.samples)
            self._counters.groups_cancelled += 1
            self._counters.tokens_cancelled += sum(len(completion.token_ids) for completion in group.completions.values())
            self._release(group.group_id)

    def _drop(self, group_id: int) -> None:
        """A scored group that will not be trained."""
        self._counters.groups_dropped += 1
        self._release(group_id)

    def _release(self, group_id: int) -> None:
        """A group is done without being trained: its place goes to another prompt."""
        self._done.add(self._admitted.pop(group_id).index)
        self._started.discard(group_id)
        self.gate.drop()
        self._room.set()
        self.buffer.changed()
