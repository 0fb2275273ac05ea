"""ONCE and BOUND on the real scheduler, gate and buffer, for any order in which engines finish requests."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.scheduler import RolloutScheduler
from tests.support.fake_workers import CountingPrompts, ScriptedEngine, ScriptedRewards
from tests.support.rollouts import make_gate, make_scheduler

SAMPLES = 3


async def train(scheduler: RolloutScheduler, engines: list[ScriptedEngine], batch: int, steps: int, lag: int) -> list[list[Group]]:
    """The trainer's side of the loop, without a trainer."""
    running = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    scheduler.open()
    taken = []
    for step in range(steps):
        groups = await scheduler.buffer.take(batch, version=step, timeout_s=20.0, what=f"batch of step {step + 1}")
        taken.append(groups)
        scheduler.trained(groups)
        for engine in engines:
            engine.version = step + 1
        scheduler.advance(step + 1)
    running.cancel()
    return taken


def make(
    engines: list[ScriptedEngine], score: ScriptedRewards, batch: int, steps: int, lag: int
) -> tuple[RolloutScheduler, CountingPrompts]:
    prompts = CountingPrompts()
    rollout = {"samples_per_prompt": SAMPLES}
    return make_scheduler(engines, make_gate(batch, lag, steps), rollout=rollout, prompts=prompts, score=score.score), prompts


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 5), steps=st.integers(1, 6), lag=st.integers(0, 3), engines=st.integers(1, 3))
def test_every_prompt_is_trained_once_and_never_too_stale(seed: int, batch: int, steps: int, lag: int, engines: int) -> None:
    workers = [ScriptedEngine(f"engine-{i}", seed + i) for i in range(engines)]
    scheduler, prompts = make(workers, ScriptedRewards(), batch, steps, lag)
    taken = asyncio.run(train(scheduler, workers, batch, steps, lag))
    trained = Counter(g.trajectories[0].prompt.index for groups in taken for g in groups)
    assert set(trained.values()) == {1}
    dropped = scheduler.take_counters().groups_dropped
    assert len(trained) == batch * steps
    assert prompts.handed_out == len(trained) + dropped
    assert dropped == 0  # the old are waited for
    for step, groups in enumerate(taken):
        for group in groups:
            assert 0 <= step - group.oldest_version <= lag
            assert len(group.trajectories) == SAMPLES
    assert scheduler.resume_point().done == ()
    assert scheduler.resume_point().source_state == {"next": prompts.handed_out}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 4), steps=st.integers(1, 5), bad=st.sets(st.integers(0, 12), max_size=5))
def test_groups_whose_rewards_fail_are_replaced_and_counted(seed: int, batch: int, steps: int, bad: set[int]) -> None:
    def failing(sample_id: str) -> bool:
        group, sample = sample_id.split("/")  # groups are numbered as their prompts
        return int(group) in bad and sample != "0"

    workers = [ScriptedEngine(seed=seed)]
    scheduler, prompts = make(workers, ScriptedRewards(failing), batch, steps, 0)
    taken = asyncio.run(train(scheduler, workers, batch, steps, 0))
    trained = Counter(g.trajectories[0].prompt.index for groups in taken for g in groups)
    dropped = {i for i in bad if i < prompts.handed_out}
    assert set(trained.values()) == {1}
    assert len(trained) == batch * steps
    assert set(trained) == set(range(prompts.handed_out)) - dropped
    counters = scheduler.take_counters()
    assert counters.groups_dropped == len(dropped)
    assert counters.reward_timeouts.total() == counters.rewards_dropped == counters.reward_retries == 2 * len(dropped)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 4), steps=st.integers(2, 6), lag=st.integers(0, 2), data=st.data())
def test_a_restart_at_any_step_asks_exactly_what_was_not_done(seed: int, batch: int, steps: int, lag: int, data: st.DataObject) -> None:
    stop_at = data.draw(st.integers(1, steps - 1))
    workers = [ScriptedEngine(seed=seed)]
    scheduler, prompts = make(workers, ScriptedRewards(), batch, steps, lag)
    taken = asyncio.run(train(scheduler, workers, batch, stop_at, lag))
    point = scheduler.resume_point()
    before = {g.trajectories[0].prompt.index for groups in taken for g in groups}
    again = set(range(int(str(point.source_state["next"])), prompts.handed_out)) - set(point.done)
    asked = set(range(prompts.handed_out))
    dropped = scheduler.take_counters().groups_dropped
    assert before.isdisjoint(again)
    assert len(asked - before - again) == dropped
