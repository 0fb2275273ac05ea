"""Runs of the real scheduler, fleet, gate and buffer in virtual time, with everything that may go on at once; and their restarts."""

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from hypothesis import strategies as st

from rljob_api.vocabulary import GroupRouting
from rljob_runtime.journal.writing import Journal, NoJournal
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.filters import GroupFilter
from rljob_runtime.overlap.group_log import Recovered
from rljob_runtime.overlap.prompt_order import ResumePoint
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.scheduler import RolloutCounters
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import Prompt, RewardResult, Sampling
from tests.support.fake_workers import CountingPrompts
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.timed_engine import TimedEngine

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
    released: int
    """Groups counted as not trained when it was written."""
    reported: int
    """The same in the row of its step, which is later."""


@dataclass
class Attempt:
    """One process's worth of training."""

    scenario: Scenario
    start: Checkpoint | None = None
    every: int = 1
    """Steps between checkpoints."""
    journal: Journal = field(default_factory=NoJournal)
    recovered: Recovered = field(default_factory=Recovered)

    def __post_init__(self) -> None:
        s = self.scenario
        self.rng = random.Random(s.seed)
        self.step = self.start.step if self.start else 0
        self.prompts = self.make_prompts(self.start.point.source_state if self.start else None)
        self.engines = [
            self.make_engine(f"e{i}", slots=n, token_s=pace, dies_at_s=s.deaths_s.get(i, float("inf")))
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
            **self.scoring(),
            first_prompt=self.start.point.first_prompt if self.start else 0,
            done=self.start.point.done if self.start else (),
            log=self.journal,
            on_lost=lambda index, error: self.lost.append(index),
        )
        self.scheduler.restore(self.recovered)
        self.counters = RolloutCounters()
        self.released = 0
        if self.start:
            self.released = self.start.released if isinstance(self.journal, NoJournal) else self.start.reported
        self.taken: dict[int, list[Group]] = {}
        self.checkpoints: list[Checkpoint] = []

    def make_prompts(self, state: Mapping[str, object] | None) -> Any:
        """The order of prompts, from ``state`` on."""
        prompts = CountingPrompts()
        if state is not None:
            prompts.handed_out = int(str(state["next"]))
        return prompts

    def make_engine(self, name: str, **pace: Any) -> TimedEngine:
        return TimedEngine(name, length_of=self.scenario.length_of, **pace)

    def scoring(self) -> dict[str, Any]:
        """What scores, as arguments of the scheduler."""
        return {"score": self._score}

    def check(self) -> None:
        """BOUND, and every response whole."""
        check_groups(self)

    async def _score(self, batch: RewardBatch) -> list[RewardResult]:
        await asyncio.sleep(self.rng.choice([0.0, 0.3, 5.0]))
        return [self._scored(name, prompt) for name, prompt in zip(batch.sample_ids, batch.prompts, strict=True)]

    def _scored(self, sample_id: str, prompt: Prompt) -> RewardResult:
        index = prompt.index
        if self.scenario.fails and index % 7 == 3:
            return RewardResult(sample_id=sample_id, score=None, error="broken")
        same = index % 3 == 0
        return RewardResult(sample_id=sample_id, score=0.1 if same else float(sample_id.split("/")[1]))

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
            point, released = scheduler.resume_point(), self.released
            if due := self.step % self.every == 0:
                self.journal.cut(self.step, scheduler.unfinished)
            async with scheduler.updating(f"v{self.step}"):
                for engine in self.engines:
                    assert not scenario.drains or not engine.running or scheduler.fleet.lost
                    await asyncio.sleep(scenario.sync_s)
                    engine.version = self.step
            scheduler.advance(self.step)
            self._count()
            self.journal.reported(self.step)
            if due:
                self.checkpoints.append(Checkpoint(self.step, point, released, self.released))
                await asyncio.sleep(0)
                self.journal.complete(self.step)
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
            for trajectory in group.trajectories:
                (segment,) = trajectory.segments
                assert segment.token_ids.tolist() == list(range(scenario.length_of(f"{group.group_id}/{trajectory.sample_index}")))
                edges = [0, *(span.end for span in segment.version_spans)]
                assert edges == [*(span.start for span in segment.version_spans), len(segment)]
                versions = [span.version for span in segment.version_spans]
                assert versions == sorted(set(versions))
                assert versions[0] >= step - scenario.bound
                assert versions[-1] <= step


def trained(attempt: Attempt, before: int | None = None) -> list[int]:
    """Prompts of the batches, of those that were trained by ``before``."""
    steps = [step for step in attempt.taken if before is None or step < before]
    return [group.trajectories[0].prompt.index for step in steps for group in attempt.taken[step]]
