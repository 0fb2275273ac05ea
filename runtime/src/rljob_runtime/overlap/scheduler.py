"""Keeps the engines busy: admits prompts under the gate, gathers groups, has them scored.

Generation goes on while rewards are computed and while the trainer works, as far as the gate allows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from rljob_runtime.cluster.protocol import INLINE_BYTES, Worker
from rljob_runtime.errors import FilteredOutError
from rljob_runtime.overlap.buffer import Group, TrajectoryBuffer
from rljob_runtime.overlap.episodes import Environments, EpisodeCounters
from rljob_runtime.overlap.failing import FailingRewards
from rljob_runtime.overlap.filters import GroupFilter
from rljob_runtime.overlap.fleet import EngineFleet, FleetChange, FleetConfig, OnLost
from rljob_runtime.overlap.fleet_engine import now_s
from rljob_runtime.overlap.group_log import Ending, GroupLog, NoGroupLog, Recovered
from rljob_runtime.overlap.judge_counts import JudgeCounts
from rljob_runtime.overlap.prompt_order import PromptOrder, Prompts, ResumePoint
from rljob_runtime.overlap.routing import GroupAffinity
from rljob_runtime.overlap.samples import Response, Sample
from rljob_runtime.overlap.staleness import GroupVersions, StalenessGate
from rljob_runtime.packed import RewardBatch, reward_batch
from rljob_runtime.records import Completion, GenerationRequest, Prompt, RewardResult, Sampling, Trajectory

MIN_GROUP_SAMPLES = 2
"""A group needs a comparison; smaller ones are dropped and replaced."""
ADMITTED_AT_ONCE = 256
"""Samples, or one group; what else is due runs between two such portions of a large batch."""
SCORED_AT_ONCE = 256
"""Responses from which on a call is made while more are being received: calls cost more than responses, above all of one worker, which
answers them in turn."""
KEPT_FAILED = 4
"""Samples of a step that failed, to be read; all are counted."""
PRIORITY = 1
"""Validation has a lower one: it is short and should soon report how good some weights are."""

ScoreResponses = Callable[[RewardBatch], Awaitable[list[RewardResult]]]


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

    @property
    def requests_per_prompt(self) -> int:
        """Responses that are begun for a prompt."""
        return self.samples_per_prompt + self.redundant_samples


@dataclass(slots=True)
class RolloutCounters:
    """What happened since the last :meth:`RolloutScheduler.take_counters`."""

    tokens: int = 0
    reward_errors: Counter[str] = field(default_factory=Counter)
    """By reward: evaluations that failed other than by time."""
    reward_timeouts: Counter[str] = field(default_factory=Counter)
    """By reward: evaluations that ran past their limit twice."""
    judges: JudgeCounts = field(default_factory=JudgeCounts)
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
    failed: list[Trajectory] = field(default_factory=list)
    """The first ``KEPT_FAILED`` samples without a score, to be read."""
    engine_pause_s: float = 0.0
    requests_moved: int = 0
    """Taken from engines that paused or were lost, or that others relieved."""
    tokens_kept: int = 0
    """Tokens of those, which are not sampled again."""
    history_tokens_kept: int = 0
    """Tokens of requests that an engine had cached, and that went there."""
    history_tokens_moved: int = 0
    """The same of those that went to another engine."""
    episodes: EpisodeCounters | None = None
    """Of an agentic job."""


@dataclass(slots=True)
class _OpenGroup:
    group_id: int
    prompt: Prompt
    samples: list[Sample]
    responses: dict[int, Response] = field(default_factory=dict)
    rewards: dict[int, RewardResult] = field(default_factory=dict)
    """Of reward functions; an environment's come with the responses."""
    num_failed: int = 0
    """Episodes among them that have no score."""


class RolloutScheduler:
    """One per job. ``run`` ends only by cancellation or failure; failures also reach whoever waits on the buffer."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        engines: Sequence[Worker],
        score: ScoreResponses | None = None,
        environments: Environments | None = None,
        gate: StalenessGate,
        config: RolloutConfig,
        first_prompt: int = 0,
        done: Sequence[int] = (),
        log: GroupLog | None = None,
        on_lost: OnLost | None = None,
    ) -> None:
        """Wire the parts.

        Args:
            prompts: where new prompts come from.
            engines: rollout workers.
            score: rewards of several responses, in order; a failing sample is a result, not an exception. None where environments score.
            environments: where prompts are tasks to be played; None: each response is all there is.
            gate: admission, and how old what is trained may be.
            config: from the spec.
            first_prompt: ``ResumePoint.first_prompt`` of the checkpoint.
            done: ``ResumePoint.done`` of the checkpoint: prompts the source gives again that need no asking.
            log: notified of what becomes of groups.
            on_lost: of the fleet.

        Raises:
            ValueError: both of ``score`` and ``environments`` are given, or none.
        """
        if (score is None) == (environments is None):
            raise ValueError("exactly one of score and environments is needed; episodes have their scores from environments")
        self._prompts = PromptOrder(prompts, first_prompt=first_prompt, done=done)
        self._score = score
        self.gate = gate
        self.config = config
        self._log = log or NoGroupLog()
        self._open: dict[int, _OpenGroup] = {}
        self._started = GroupVersions()
        """Of groups that are not in the buffer yet."""
        self._room = asyncio.Event()
        self._complete: list[_OpenGroup] = []
        """Groups that wait for the next pass of the event loop to be scored."""
        self._scoring: set[asyncio.Task[None]] = set()
        self._unscored = 0
        self._scoring_failed: asyncio.Future[None] | None = None
        self._counters = RolloutCounters()
        self._filtered_in_row: list[float] = []
        """Mean scores of the groups filtered since one was kept."""
        self._failing = FailingRewards()
        self.fleet = EngineFleet(engines, config=config.fleet, on_lost=on_lost)
        self.environments = environments
        self._player = None if environments is None else environments.player(self, self.fleet, config.sampling, config.seed)
        self._generation = self.fleet if self._player is None else self._player
        """Makes a response, or an episode, of each sample."""
        self.buffer = TrajectoryBuffer(
            gate=gate,
            unfinished=self._started,
            on_drop=lambda group: self._release(group.group_id, Ending.DROPPED),
            on_taken=self._log.taken,
        )

    @property
    def priority(self) -> int:
        """Priority of its requests."""
        return PRIORITY

    @property
    def unfinished(self) -> Collection[int]:
        """Ids of the groups that were admitted and are neither trained nor released."""
        return self._prompts.in_flight

    @property
    def num_generated(self) -> int:
        """Groups of which everything is generated and that were not taken yet, scored or not."""
        return self._unscored + len(self.buffer)

    def is_generated(self, groups: int, version: int) -> bool:
        """Whether a batch of ``groups``, to be trained from ``version``, lacks nothing but scores."""
        generating = Counter(started for group in self._open if (started := self._started.get(group)) is not None)
        return self.num_generated >= groups and self.buffer.suffices(groups, version, generating)

    @property
    def num_samples(self) -> int:
        """Samples of groups that were not taken yet: those that wait or run, and those of whole groups, which have ended."""
        return self.fleet.num_running + self.fleet.num_waiting + self.num_generated * self.config.samples_per_prompt

    def restore(self, recovered: Recovered) -> None:
        """Go on with what an earlier attempt had finished; once, before :meth:`run`."""
        groups = recovered.groups
        self._prompts.restore((group.group_id for group in groups), recovered.released)
        for ending in recovered.released.values():
            self._count(ending)
        self.gate.restore(len(groups), next_batch=self.gate.version + len(recovered.batches))
        self.buffer.restore(recovered.batches, recovered.waiting)

    def resume_point(self) -> ResumePoint:
        """What a checkpoint must remember of the prompts; O(prompts in flight)."""
        return self._prompts.resume_point()

    def trained(self, groups: Sequence[Group]) -> None:
        """These groups have been trained; they need not be asked again after a resume. O(prompts in flight)."""
        for group in groups:
            self._prompts.end(group.group_id)
        self._prompts.forget_passed()  # checkpoints may be far apart, or never come

    def open(self) -> None:
        """The first weights are served: admission begins."""
        self._room.set()

    def advance(self, version: int) -> None:
        """New weights are served by every engine: more groups may be admitted."""
        self.gate.advance(version)
        self.fleet.forget_prefixes()
        self._cancel_too_stale(version)
        self._room.set()

    def take_counters(self) -> RolloutCounters:
        """Counters since the last call."""
        taken, self._counters = self._counters, RolloutCounters()
        fleet = self.fleet.take_counts()
        episodes = None if self._player is None else self._player.take_counters()
        tokens_cancelled = taken.tokens_cancelled + (0 if episodes is None else episodes.tokens_cancelled)
        return replace(
            taken,
            episodes=episodes,
            requests_cancelled=taken.requests_cancelled + fleet.requests_cancelled,
            tokens_cancelled=tokens_cancelled + fleet.tokens_cancelled,
            engines_lost=fleet.engines_lost,
            requests_moved=taken.requests_moved + fleet.requests_moved,
            tokens_kept=taken.tokens_kept + fleet.tokens_kept,
            history_tokens_kept=fleet.history_tokens_kept,
            history_tokens_moved=fleet.history_tokens_moved,
        )

    async def run(self) -> None:
        """Admit and collect until cancelled."""
        self._scoring_failed = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._admit_forever())
                tasks.create_task(self._watch_scoring())
                tasks.create_task(self.fleet.run())
                if self.environments is not None:
                    tasks.create_task(self.environments.router.run())
        except BaseExceptionGroup as failures:
            first: BaseException = failures
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            self.buffer.fail(first)
            raise first from failures
        finally:
            self._complete.clear()
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
            while count := min(self.gate.capacity, max(ADMITTED_AT_ONCE // self.config.requests_per_prompt, 1)):
                self.gate.admit(count)
                self._submit(self._prompts.next(count))
                await asyncio.sleep(0)

    def _submit(self, prompts: Sequence[Prompt]) -> None:
        samples = []
        for prompt in prompts:
            group_id = prompt.index  # the same whenever it is asked again
            affinity = GroupAffinity()
            made = [
                Sample(owner=self, group_id=group_id, index=index, prompt=prompt, affinity=affinity)
                for index in range(self.config.requests_per_prompt)
            ]
            self._open[group_id] = _OpenGroup(group_id, prompt, made)
            samples += made
        self._generation.add(samples)

    def request_of(self, sample: Sample) -> GenerationRequest:
        """The next part of a sample; its first one starts its group."""
        self.on_started(sample)
        return sample.request(self.config.sampling, self.config.seed)

    def on_started(self, sample: Sample) -> None:
        """A part of a sample is given to an engine; its first one starts its group."""
        self._started.add(sample.group_id, self.gate.version)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        """Gather responses; groups that are complete are scored."""
        ended_s = now_s()
        self._gather([(sample, sample.response(completion, ended_s)) for sample, completion in finished])

    def on_played(self, played: list[tuple[Sample, Response]]) -> None:
        """Gather episodes; groups that are complete have their scores."""
        self._gather(played)

    def _gather(self, finished: Sequence[tuple[Sample, Response]]) -> None:
        self._counters.last_completion_s = now_s()
        complete: list[_OpenGroup] = []
        for sample, response in finished:
            self._counters.tokens += response.num_sampled
            group = self._open.get(sample.group_id)
            if group is None:  # its group was complete, or given up, by a response that ended together with this one
                self._counters.requests_cancelled += 1
                self._counters.tokens_cancelled += response.num_sampled
                continue
            group.responses[sample.index] = response
            group.num_failed += response.reward is not None and response.reward.score is None
            ended = len(group.responses)
            if ended == len(group.samples) or ended - group.num_failed == self.config.samples_per_prompt:
                complete.append(self._open.pop(sample.group_id))
                if self.config.redundant_samples:
                    self._generation.cancel(group.samples)
        if complete and self._score is None:
            self._sort_out_all(complete)
        elif complete:
            self._unscored += len(complete)
            if not self._complete:
                asyncio.get_running_loop().call_soon(self._begin_scoring)
            self._complete += complete

    def _begin_scoring(self) -> None:
        """Have everything scored that is complete, together with what comes in the next passes; nothing once the run has ended."""
        if not self._complete:
            return
        if self.fleet.is_receiving and sum(len(group.responses) for group in self._complete) < SCORED_AT_ONCE:
            asyncio.get_running_loop().call_soon(self._begin_scoring)
            return
        complete, self._complete = self._complete, []
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
        assert self._score is not None
        members = [(group, index, group.responses[index]) for group in groups for index in sorted(group.responses)]
        started = now_s()
        make = partial(
            reward_batch,
            sample_ids=[f"{g.group_id}/{index}" for g, index, _ in members],
            prompts=[r.prompt for _, _, r in members],
            finish_reasons=[r.finish_reason for _, _, r in members],
            tokens=[r.segments[0].token_ids for _, _, r in members],
        )
        large = sum(r.segments[0].token_ids.nbytes for _, _, r in members) >= INLINE_BYTES
        results = await self._score(await asyncio.to_thread(make) if large else make())
        self._counters.reward_s += now_s() - started
        for (group, index, _), result in zip(members, results, strict=True):
            group.rewards[index] = result
        self._unscored -= len(groups)
        self._sort_out_all(groups)

    def _sort_out_all(self, groups: Sequence[_OpenGroup]) -> None:
        """Scored groups become trajectories."""
        for group in groups:
            kept = []
            for index, response in sorted(group.responses.items()):
                reward = response.reward or group.rewards[index]
                self._count_problems(reward)
                trajectory = response.scored(group.group_id, index, reward)
                if reward.score is not None:
                    kept.append(trajectory)
                elif len(self._counters.failed) < KEPT_FAILED:
                    self._counters.failed.append(trajectory)
            self._sort_out(group.group_id, kept)

    def _sort_out(self, group_id: int, kept: Sequence[Trajectory]) -> None:
        """Keep a scored group for the trainer, or replace it."""
        scores = [t.reward.score for t in kept if t.reward.score is not None]
        is_scored = len(scores) >= min(MIN_GROUP_SAMPLES, self.config.samples_per_prompt)
        self._failing.count(is_scored, self._counters.reward_messages)
        if not is_scored:
            self._release(group_id, Ending.DROPPED)
        elif self.config.group_filter is not None and not self.config.group_filter.keeps(scores):
            self._filtered_in_row.append(sum(scores) / len(scores))
            self._check_filter(self.config.group_filter)
            self._release(group_id, Ending.FILTERED)
        else:
            self._filtered_in_row.clear()
            self._started.discard(group_id)
            failed = max(self.config.samples_per_prompt - len(kept), 0)
            group = Group(group_id=group_id, trajectories=tuple(kept), failed_samples=failed)
            self._log.finished(group)
            self.buffer.put(group)

    def _check_filter(self, group_filter: GroupFilter) -> None:
        """Raises FilteredOutError where nothing seems to pass."""
        if len(self._filtered_in_row) >= self.config.max_filtered_in_row:
            means = ", ".join(f"{mean:.3g}" for mean in self._filtered_in_row[-5:])
            raise FilteredOutError(
                f"{len(self._filtered_in_row)} groups in a row were filtered: kept is {group_filter}, their last mean scores are {means}; "
                "give prompts that are neither too easy nor too hard for the model, loosen the filter, or allow more in a row"
            )

    def _count_problems(self, result: RewardResult) -> None:
        """What failed in scoring, whether or not a score took its place, and what judges did."""
        if result.errors or result.timeouts:
            self._counters.reward_errors.update(result.errors)
            self._counters.reward_timeouts.update(result.timeouts)
        self._counters.judges.add(result.judgements)
        self._counters.reward_retries += result.retries
        self._counters.rewards_dropped += result.score is None
        if result.error is not None:
            self._counters.reward_messages.append(result.error)

    def _cancel_too_stale(self, version: int) -> None:
        """Give up groups that are still being generated and would be too stale for a batch trained from ``version``."""
        started = {group_id: self._started.get(group_id) for group_id in self._open}
        for group in [self._open[i] for i, v in started.items() if v is not None and self.gate.too_stale(v, version)]:
            del self._open[group.group_id]
            self._generation.cancel(group.samples)
            self._counters.tokens_cancelled += sum(response.num_sampled for response in group.responses.values())
            self._release(group.group_id, Ending.CANCELLED)

    def _count(self, ending: Ending | None) -> None:
        self._counters.groups_dropped += ending is Ending.DROPPED
        self._counters.groups_filtered += ending is Ending.FILTERED
        self._counters.groups_cancelled += ending is Ending.CANCELLED

    def _release(self, group_id: int, ending: Ending) -> None:
        """A group is done without being trained: its place goes to another prompt."""
        self._count(ending)
        self._log.released(group_id, ending)
        self._prompts.end(group_id)
        self._started.discard(group_id)
        self.gate.drop()
        self._room.set()
        self.buffer.changed()
