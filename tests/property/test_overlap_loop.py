"""BOUND, ONCE and NO-HANG on the real scheduler, fleet, gate and buffer, in virtual time, with everything that may go on at once."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.vocabulary import GroupRouting
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.filters import GroupFilter
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.scheduler import ResumePoint, RolloutCounters
from rljob_runtime.records import RewardRequest, RewardResult, Sampling
from tests.support.fake_workers import CountingPrompts
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.timed_engine import TimedEngine
from tests.support.virtual_time import run_virtual

DEADLINE_S = 50_000.0
"""Virtual; of one batch. The longest response takes 40 tokens of 3 s."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A run, its engines and what goes wrong."""

    seed: int
    batch: int
    steps: int
    lag: float
    max_staleness: int | None
    spare: int
    samples: int
    redundant: int
    filters: bool
    fails: bool
    slots: tuple[int, ...]
    queued: int
    paces_s: tuple[float, ...]
    deaths_s: Mapping[int, float]
    routing: GroupRouting
    drains: bool
    train_s: float
    sync_s: float

    @property
    def bound(self) -> int:
        return ceil(self.lag) if self.max_staleness is None else self.max_staleness

    def length_of(self, key: str) -> int:
        """Mostly short, some very long."""
        rng = random.Random(f"{self.seed}/{key}")
        return 40 if rng.random() < 0.15 else rng.randint(1, 8)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    engines = draw(st.integers(1, 3))
    survivors = draw(st.integers(1, engines))
    return Scenario(
        seed=draw(st.integers(0, 10_000)),
        batch=draw(st.integers(1, 4)),
        steps=draw(st.integers(1, 5)),
        lag=draw(st.sampled_from([0, 0.5, 1, 1.5, 2])),
        max_staleness=draw(st.sampled_from([None, None, 0, 1, 2, 3])),
        spare=draw(st.sampled_from([0, 0, 1, 3])),
        samples=draw(st.integers(1, 3)),
        redundant=draw(st.sampled_from([0, 0, 1, 2])),
        filters=draw(st.booleans()),
        fails=draw(st.booleans()),
        slots=tuple(draw(st.integers(1, 4)) for _ in range(engines)),
        queued=draw(st.integers(0, 3)),
        paces_s=tuple(draw(st.sampled_from([0.1, 0.5, 3.0])) for _ in range(engines)),
        deaths_s={i: draw(st.floats(0.0, 60.0)) for i in range(survivors, engines)},
        routing=draw(st.sampled_from(list(GroupRouting))),
        drains=draw(st.booleans()),
        train_s=draw(st.sampled_from([0.0, 2.0, 30.0])),
        sync_s=draw(st.sampled_from([0.0, 1.5])),
    )


@dataclass
class Checkpoint:
    """What a restart goes on from."""

    step: int
    point: ResumePoint
    next_group_id: int
    released: int
    """Groups counted as not trained so far."""


@dataclass
class Attempt:
    """One process's worth of training."""

    scenario: Scenario
    start: Checkpoint | None = None

    def __post_init__(self) -> None:
        s = self.scenario
        self.rng = random.Random(s.seed)
        self.step = self.start.step if self.start else 0
        self.prompts = CountingPrompts()
        if self.start:
            self.prompts.handed_out = int(str(self.start.point.source_state["next"]))
        self.engines = [
            TimedEngine(f"e{i}", slots=n, token_s=pace, length_of=s.length_of, dies_at_s=s.deaths_s.get(i, float("inf")))
            for i, (n, pace) in enumerate(zip(s.slots, s.paces_s, strict=True))
        ]
        self.lost: list[int] = []
        self.scheduler = make_scheduler(
            self.engines,
            make_gate(s.batch, s.lag, s.steps, version=self.step, max_staleness=s.bound, spare=s.spare),
            rollout={
                "samples_per_prompt": s.samples,
                "sampling": Sampling(max_tokens=64),
                "drains": s.drains,
                "redundant_samples": s.redundant,
                "group_filter": GroupFilter(min_std=0.0) if s.filters and s.samples > 1 else None,
            },
            fleet={
                "capacities": tuple(Capacity(slots=n, queued=s.queued) for n in s.slots),
                "stall_timeout_s": 1000.0,
                "group_routing": s.routing,
            },
            prompts=self.prompts,
            score=self._score,
            next_group_id=self.start.next_group_id if self.start else 0,
            done=self.start.point.done if self.start else (),
            on_lost=lambda index, error: self.lost.append(index),
        )
        self.counters = RolloutCounters()
        self.released = self.start.released if self.start else 0
        self.taken: dict[int, list[Group]] = {}
        self.checkpoints: list[Checkpoint] = []

    async def _score(self, requests: list[RewardRequest]) -> list[RewardResult]:
        await asyncio.sleep(self.rng.choice([0.0, 0.3, 5.0]))
        return [self._scored(r) for r in requests]

    def _scored(self, request: RewardRequest) -> RewardResult:
        index = request.prompt.index
        if self.scenario.fails and index % 7 == 3:
            return RewardResult(sample_id=request.sample_id, score=None, error="broken")
        same = index % 3 == 0
        return RewardResult(sample_id=request.sample_id, score=0.1 if same else float(request.sample_id.split("/")[1]))

    def _count(self) -> None:
        taken = self.scheduler.take_counters()
        self.released += taken.groups_dropped + taken.groups_filtered + taken.groups_cancelled
        for name in ("groups_dropped", "groups_cancelled", "groups_filtered", "requests_cancelled", "tokens_cancelled", "engines_lost"):
            setattr(self.counters, name, getattr(self.counters, name) + getattr(taken, name))

    async def train(self, until: int, linger_s: float = 0.0) -> None:
        """The driver's loop to step ``until``; the process then ends after ``linger_s``."""
        scenario, scheduler = self.scenario, self.scheduler
        for engine in self.engines:
            engine.version = self.step
        running = asyncio.ensure_future(scheduler.run())
        scheduler.open()
        while self.step < until:
            groups = await scheduler.buffer.take(scenario.batch, version=self.step, timeout_s=DEADLINE_S, what="batch")
            self.taken[self.step] = groups
            await asyncio.sleep(scenario.train_s)
            self.step += 1
            scheduler.trained(groups)
            self._count()
            self.checkpoints.append(Checkpoint(self.step, scheduler.resume_point(), scheduler.next_group_id, self.released))
            async with scheduler.updating(f"v{self.step}"):
                for engine in self.engines:
                    assert not scenario.drains or not engine.running or scheduler.fleet.lost
                    await asyncio.sleep(scenario.sync_s)
                    engine.version = self.step
            scheduler.advance(self.step)
        await asyncio.sleep(linger_s)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])


def check_groups(attempt: Attempt) -> None:
    """BOUND, and every response whole."""
    scenario = attempt.scenario
    for step, groups in attempt.taken.items():
        assert len(groups) == scenario.batch
        for group in groups:
            indexes = [t.sample_index for t in group.trajectories]
            assert len(indexes) == scenario.samples
            assert sorted(set(indexes)) == indexes
            assert indexes[-1] < scenario.samples + scenario.redundant
            for completion in (t.completion for t in group.trajectories):
                assert completion.token_ids == tuple(range(scenario.length_of(completion.request_id)))
                edges = [0, *(span.end for span in completion.version_spans)]
                assert edges == [*(span.start for span in completion.version_spans), len(completion.token_ids)]
                versions = [span.version for span in completion.version_spans]
                assert versions == sorted(set(versions))
                assert versions[0] >= step - scenario.bound
                assert versions[-1] <= step


def trained(attempt: Attempt, before: int | None = None) -> list[int]:
    """Prompts of the batches, of those that were trained by ``before``."""
    steps = [step for step in attempt.taken if before is None or step < before]
    return [group.trajectories[0].prompt.index for step in steps for group in attempt.taken[step]]


@settings(max_examples=120, deadline=None)
@given(scenario=scenarios())
def test_a_run_ends_and_every_prompt_is_trained_once_or_counted(scenario: Scenario) -> None:
    attempt = Attempt(scenario)
    run_virtual(attempt.train(scenario.steps))
    check_groups(attempt)
    prompts = trained(attempt)
    assert len(set(prompts)) == len(prompts) == scenario.batch * scenario.steps
    assert attempt.prompts.handed_out == len(prompts) + attempt.released
    assert attempt.scheduler.resume_point() == ResumePoint(source_state={"next": attempt.prompts.handed_out}, done=())
    counters = attempt.counters
    assert set(attempt.lost) <= set(scenario.deaths_s)
    assert counters.engines_lost == len(attempt.lost) == len(attempt.scheduler.fleet.lost)
    if scenario.bound >= scenario.lag and not scenario.spare:
        assert counters.groups_cancelled == 0
        assert counters.groups_dropped == 0 or scenario.fails
        assert counters.requests_cancelled == 0 or scenario.redundant
    sent = [request.request_id for engine in attempt.engines for request in engine.seen]
    assert len(set(sent)) == len(sent)


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(), lag=st.sampled_from([0.5, 1, 1.5, 2]), more=st.integers(0, 1))
def test_a_bound_of_at_least_the_lag_loses_no_straggler(scenario: Scenario, lag: float, more: int) -> None:
    slots = tuple(12 for _ in scenario.slots)
    roomy = replace(scenario, steps=8, lag=lag, max_staleness=ceil(lag) + more, spare=0, redundant=0, fails=False, slots=slots, deaths_s={})
    attempt = Attempt(roomy)
    run_virtual(attempt.train(roomy.steps))
    counters = attempt.counters
    assert (counters.groups_dropped, counters.groups_cancelled, counters.requests_cancelled, counters.tokens_cancelled) == (0, 0, 0, 0)
    assert attempt.prompts.handed_out == roomy.batch * roomy.steps + counters.groups_filtered


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(), data=st.data())
def test_a_restart_at_any_time_loses_and_repeats_nothing(scenario: Scenario, data: st.DataObject) -> None:
    first = Attempt(scenario)
    run_virtual(first.train(data.draw(st.integers(1, scenario.steps)), linger_s=data.draw(st.floats(0.0, 50.0))))
    checkpoint = data.draw(st.sampled_from(first.checkpoints))
    second = Attempt(scenario, start=checkpoint)
    run_virtual(second.train(scenario.steps))
    check_groups(first)
    check_groups(second)
    prompts = trained(first, before=checkpoint.step) + trained(second)
    assert len(set(prompts)) == len(prompts) == scenario.batch * scenario.steps
    handed_out = second.prompts.handed_out
    not_asked_again = [index for index in checkpoint.point.done if index >= handed_out]
    assert handed_out + len(not_asked_again) == len(prompts) + second.released
