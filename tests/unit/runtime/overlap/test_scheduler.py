"""What the scheduler does when things go wrong, and what a resumed one asks first."""

import asyncio
from typing import Any

import pytest

from rljob_runtime.errors import DeadlineError, EngineLostError, WorkerLostError
from rljob_runtime.overlap.fleet import RESPONSES_AT_ONCE
from rljob_runtime.overlap.samples import sample_seed
from rljob_runtime.overlap.scheduler import SCORED_AT_ONCE, RolloutScheduler
from rljob_runtime.packed import CompletionBatch, RewardBatch, pack
from rljob_runtime.records import RewardResult
from tests.support.fake_workers import ScriptedEngine, ScriptedRewards
from tests.support.records import make_completion
from tests.support.rollouts import make_gate, make_scheduler


def scheduler_of(engines: list[ScriptedEngine], *, stall_timeout_s: float = 60.0, **options: Any) -> RolloutScheduler:
    fleet = {"stall_timeout_s": stall_timeout_s, "affinity_margin": 0}
    return make_scheduler(engines, make_gate(2, 0, steps=4), fleet=fleet, **options)


async def started(scheduler: RolloutScheduler) -> asyncio.Task[None]:
    task = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    scheduler.open()
    return task


def test_a_dead_engine_ends_the_wait_for_a_batch() -> None:
    async def body() -> None:
        engine = ScriptedEngine("actor_infer-0")
        engine.dead = True
        scheduler = scheduler_of([engine])
        running = await started(scheduler)
        with pytest.raises(WorkerLostError, match=r"actor_infer-0 is gone \(signal 9\)"):
            await scheduler.buffer.take(2, version=0, timeout_s=10.0, what="batch of step 1")
        with pytest.raises(WorkerLostError):
            await running

    asyncio.run(body())


def test_an_engine_that_gives_no_token_within_the_stall_timeout_is_lost() -> None:
    async def body() -> None:
        engine = ScriptedEngine("actor_infer-0")
        engine.stalled = True
        running = await started(scheduler_of([engine], stall_timeout_s=0.01))
        with pytest.raises(EngineLostError, match=r"engine actor_infer-0 is lost \(it gave no token for 0 s while 4 requests ran"):
            await asyncio.wait_for(running, 10.0)

    asyncio.run(body())


def test_requests_spread_evenly_over_engines() -> None:
    async def body() -> None:
        engines = [ScriptedEngine(f"e{i}", i) for i in range(4)]
        scheduler = scheduler_of(engines)
        running = await started(scheduler)
        await scheduler.buffer.take(2, version=0, timeout_s=10.0, what="batch")
        running.cancel()
        assert [len(e.seen) for e in engines] == [1, 1, 1, 1]

    asyncio.run(body())


def test_samples_are_held_from_their_request_until_their_group_is_taken() -> None:
    async def body() -> None:
        scheduler = scheduler_of([ScriptedEngine()])
        running = await started(scheduler)
        held = []
        while len(scheduler.buffer) < 2:
            held.append(scheduler.num_samples)
            await asyncio.sleep(0)
        held.append(scheduler.num_samples)
        await scheduler.buffer.take(2, version=0, timeout_s=10.0, what="batch")
        running.cancel()
        assert (max(held), held[-1], scheduler.num_samples) == (4, 4, 0)  # two groups of two

    asyncio.run(body())


def test_prompts_done_before_a_checkpoint_are_not_asked_again() -> None:
    async def body() -> None:
        scheduler = scheduler_of([ScriptedEngine()], done=(0, 2))
        running = await started(scheduler)
        groups = await scheduler.buffer.take(2, version=0, timeout_s=10.0, what="batch")
        running.cancel()
        assert [g.trajectories[0].prompt.index for g in groups] == [1, 3]

    asyncio.run(body())


def test_a_batch_that_never_comes_is_named() -> None:
    async def body() -> None:
        scheduler = scheduler_of([ScriptedEngine()])
        with pytest.raises(DeadlineError, match="only 0 of 2 groups were ready within 0 s: batch of step 1"):
            await scheduler.buffer.take(2, version=0, timeout_s=0.01, what="batch of step 1")

    asyncio.run(body())


def test_seeds_differ_by_job_prompt_and_sample_and_stay_the_same() -> None:
    seeds = {sample_seed(job, prompt, sample) for job in range(3) for prompt in range(20) for sample in range(8)}
    assert len(seeds) == 3 * 20 * 8
    assert sample_seed(1, 2, 3) == sample_seed(1, 2, 3)
    assert all(0 <= s < 2**63 for s in seeds)


def test_a_group_whose_rewards_all_fail_is_replaced_by_another_prompt() -> None:
    async def body() -> None:
        rewards = ScriptedRewards(failing=lambda sample_id: sample_id.startswith("0/"))
        scheduler = scheduler_of([ScriptedEngine("actor_infer-0")], score=rewards.score)
        running = await started(scheduler)
        groups = await scheduler.buffer.take(2, version=0, timeout_s=10.0, what="batch of step 1")
        assert sorted(group.trajectories[0].prompt.index for group in groups) == [1, 2]
        counters = scheduler.take_counters()
        assert (counters.groups_dropped, counters.rewards_dropped, counters.reward_timeouts) == (1, 2, {"task": 2})
        running.cancel()

    asyncio.run(body())


def test_a_run_that_goes_on_after_a_resume_passes_what_was_trained_before() -> None:
    async def body() -> None:
        engine = ScriptedEngine("actor_infer-0")
        scheduler = scheduler_of([engine], done=(2, 3))  # trained out of turn before the checkpoint
        running = await started(scheduler)
        groups = await scheduler.buffer.take(2, version=0, timeout_s=10.0, what="batch of step 1")
        assert sorted(group.trajectories[0].prompt.index for group in groups) == [0, 1]
        scheduler.trained(groups)
        assert scheduler.resume_point().done == (2, 3)  # the source stands before them
        engine.version = 1
        scheduler.advance(1)
        groups = await scheduler.buffer.take(2, version=1, timeout_s=10.0, what="batch of step 2")
        assert sorted(group.trajectories[0].prompt.index for group in groups) == [4, 5]
        running.cancel()

    asyncio.run(body())


def test_what_an_engine_returns_at_once_is_scored_in_one_call() -> None:
    """Also where it is taken in several portions: a worker answers one call after another."""
    calls: list[int] = []

    class Whole(ScriptedEngine):
        """Answers with all that it has."""

        def collect(self, max_wait_s: float) -> CompletionBatch:
            taken, self._queue = self._queue, []
            return pack([make_completion(request.request_id, (7, 8), version) for request, version in taken])

    async def score(batch: RewardBatch) -> list[RewardResult]:
        calls.append(len(batch.sample_ids))
        return await ScriptedRewards().score(batch)

    async def body() -> None:
        engine = Whole()
        groups = RESPONSES_AT_ONCE
        scheduler = make_scheduler([engine], make_gate(groups, 0, 1), score=score)
        running = await started(scheduler)
        await scheduler.buffer.take(groups, version=0, timeout_s=10.0, what="batch")
        running.cancel()
        assert calls == [2 * groups]
        assert [request.request_id for request in engine.seen] == [f"{group}/{index}" for group in range(groups) for index in range(2)]

    asyncio.run(body())


def test_a_long_queue_of_responses_is_scored_from_a_limit_on() -> None:
    calls: list[int] = []

    async def score(batch: RewardBatch) -> list[RewardResult]:
        calls.append(len(batch.sample_ids))
        return await ScriptedRewards().score(batch)

    async def body() -> None:
        groups = SCORED_AT_ONCE
        scheduler = make_scheduler([ScriptedEngine(f"e{i}", i) for i in range(32)], make_gate(groups, 0, 1), score=score)
        running = await started(scheduler)
        await scheduler.buffer.take(groups, version=0, timeout_s=10.0, what="batch")
        running.cancel()
        assert sum(calls) == 2 * groups
        assert max(calls) < SCORED_AT_ONCE + 2 * RESPONSES_AT_ONCE

    asyncio.run(body())
