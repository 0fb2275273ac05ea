"""Each option of the overlap by itself, in virtual time: redundancy, over-sampling, filters, too old groups, lost engines."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from rljob_runtime.errors import FilteredOutError, RewardsFailedError
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.filters import GroupFilter
from rljob_runtime.overlap.samples import sample_seed
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult, Sampling
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.timed_engine import TimedEngine
from tests.support.virtual_time import run_virtual


def by_sample(sample_id: str) -> float:
    return float(sample_id.split("/")[1])


def make(engines: Sequence[TimedEngine], gate: StalenessGate, value: Callable[[str], float] = by_sample, **config: Any) -> Any:
    async def score(batch: RewardBatch) -> list[RewardResult]:
        return [RewardResult(sample_id=name, score=value(name)) for name in batch.sample_ids]

    rollout = {"sampling": Sampling(max_tokens=1000)} | config
    return make_scheduler(engines, gate, rollout=rollout, fleet={"stall_timeout_s": 1000.0}, score=score)


def within(scheduler: RolloutScheduler, body: Coroutine[Any, Any, None]) -> None:
    """Run ``body`` beside the scheduler."""

    async def main() -> None:
        running = asyncio.ensure_future(scheduler.run())
        await asyncio.sleep(0)
        scheduler.open()
        try:
            await body
        finally:
            running.cancel()
            await asyncio.wait([running])

    run_virtual(main())


async def take(scheduler: RolloutScheduler, count: int, version: int) -> list[Group]:
    groups = await scheduler.buffer.take(count, version=version, timeout_s=1000.0, what="batch")
    scheduler.trained(groups)
    return groups


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_of_redundant_samples_the_first_that_end_are_the_group() -> None:
    lengths = {"0/0": 90, "0/1": 5, "0/2": 9, "0/3": 70}
    engine = TimedEngine("e0", slots=64, length_of=lengths.__getitem__)
    scheduler = make([engine], make_gate(1, 0, steps=1), redundant_samples=2)

    async def body() -> None:
        (group,) = await take(scheduler, 1, 0)
        assert now_s() < 11
        assert [t.sample_index for t in group.trajectories] == [1, 2]
        assert group.failed_samples == 0
        assert [r.seed for r in engine.seen] == [sample_seed(5, 0, index) for index in range(4)]
        await asyncio.sleep(5.0)
        counters = scheduler.take_counters()
        assert (counters.requests_cancelled, counters.tokens, counters.groups_cancelled) == (2, 14, 0)
        assert 18 <= counters.tokens_cancelled <= 20
        assert not engine.running

    within(scheduler, body())


def test_over_sampling_trains_the_first_finished_and_refills_at_the_next_version() -> None:
    engine = TimedEngine("e0", slots=64, length_of=lambda key: 400 if key.split("/")[0] in ("0", "2") else 5)
    gate = make_gate(2, 0, steps=3, spare=2)
    scheduler = make([engine], gate)

    async def body() -> None:
        groups = await take(scheduler, 2, 0)
        assert now_s() < 7
        assert [g.group_id for g in groups] == [1, 3]
        await asyncio.sleep(20.0)
        async with scheduler.updating("v1"):
            await asyncio.sleep(0.5)
            assert engine.aborted == ["0/0", "0/1", "2/0", "2/1"]
            assert not engine.running  # given up before the update, and nothing begins under weights that end now
            engine.version = 1
        scheduler.advance(1)
        assert scheduler.take_counters().groups_cancelled == 2
        groups = await take(scheduler, 2, 1)
        assert [g.group_id for g in groups] == [4, 5]
        assert gate.capacity == 0

    within(scheduler, body())


def test_surplus_groups_stay_usable_within_the_bound() -> None:
    engine = TimedEngine("e0", slots=64, length_of=lambda key: 9 if key.startswith("0/") else 5)
    scheduler = make([engine], make_gate(2, 0, steps=3, spare=1, max_staleness=1))

    async def body() -> None:
        assert [g.group_id for g in await take(scheduler, 2, 0)] == [1, 2]
        await asyncio.sleep(20.0)
        engine.version = 1
        scheduler.advance(1)
        groups = await take(scheduler, 2, 1)
        assert groups[0].group_id == 0
        assert groups[0].oldest_version == 0
        counters = scheduler.take_counters()
        assert (counters.groups_dropped, counters.groups_cancelled) == (0, 0)

    within(scheduler, body())


def test_more_staleness_than_lag_waits_less_for_a_straggler() -> None:
    def taken_at_s(max_staleness: int) -> list[float]:
        engine = TimedEngine("e0", slots=64, length_of=lambda key: 100 if key.startswith("0/") else 5)
        gate = make_gate(1, 1, steps=8, max_staleness=max_staleness)
        scheduler, times = make([engine], gate), []

        async def body() -> None:
            for version in range(4):
                await take(scheduler, 1, version)
                times.append(now_s())
                engine.version = version + 1
                scheduler.advance(version + 1)
            assert scheduler.take_counters().groups_cancelled == 0

        within(scheduler, body())
        return times

    assert [t > 90 for t in taken_at_s(1)] == [False, True, True, True]
    assert [t > 90 for t in taken_at_s(3)] == [False, False, False, True]


def test_a_filtered_group_is_replaced_at_once_while_others_are_still_generated() -> None:
    engine = TimedEngine("e0", slots=64, length_of=lambda key: 30 if key.startswith("0/") else 5)
    gate = make_gate(2, 0, steps=1)
    scheduler = make([engine], gate, lambda name: 0.0 if name.startswith("1/") else by_sample(name), group_filter=GroupFilter(min_std=0.0))

    async def body() -> None:
        await asyncio.sleep(7.0)
        assert "2/0" in engine.running
        assert [g.group_id for g in await take(scheduler, 2, 0)] == [0, 2]
        assert scheduler.take_counters().groups_filtered == 1
        assert scheduler.resume_point().source_state == {"next": 3}

    within(scheduler, body())


def test_a_filter_that_keeps_nothing_is_an_error_with_its_bounds_and_the_last_means() -> None:
    gate = make_gate(2, 0, steps=50)
    bounds = GroupFilter(min_mean=0.1, max_mean=0.9)
    scheduler = make([TimedEngine("e0", slots=64)], gate, lambda name: 1.0, group_filter=bounds, max_filtered_in_row=6)

    async def body() -> None:
        with pytest.raises(FilteredOutError, match=r"6 groups in a row .* mean > 0.1 and mean < 0.9, .* are 1, 1, 1, 1, 1; give prompts"):
            await take(scheduler, 2, 0)

    within(scheduler, body())


def failing(fails: Callable[[int], bool]) -> Any:
    async def score(batch: RewardBatch) -> list[RewardResult]:
        return [
            RewardResult(sample_id=name, score=None, errors={"mine": 1}, error="reward 'mine': KeyError: 'gold'")
            if fails(int(name.split("/")[0]))
            else RewardResult(sample_id=name, score=by_sample(name))
            for name in batch.sample_ids
        ]

    rollout = {"sampling": Sampling(max_tokens=1000)}
    engines, gate = [TimedEngine("e0", slots=64)], make_gate(2, 0, steps=500)
    return make_scheduler(engines, gate, rollout=rollout, fleet={"stall_timeout_s": 1000.0}, score=score)


def test_rewards_that_fail_on_everything_end_the_run_with_their_error() -> None:
    """Or it would generate and drop groups until somebody looks."""
    scheduler = failing(lambda group: True)

    async def body() -> None:
        with pytest.raises(RewardsFailedError, match=r"of 100 groups .* reward 'mine': KeyError: 'gold'; correct the reward or the data"):
            await take(scheduler, 2, 0)

    within(scheduler, body())


def test_rewards_that_fail_on_most_groups_do_not() -> None:
    scheduler = failing(lambda group: group % 50 != 0)

    async def body() -> None:
        assert [g.group_id for g in await take(scheduler, 2, 0)] == [0, 50]

    within(scheduler, body())


def test_filtered_groups_with_kept_ones_between_are_no_error() -> None:
    gate = make_gate(2, 0, steps=10)
    config = {"group_filter": GroupFilter(min_std=0.0), "max_filtered_in_row": 3}
    engine = TimedEngine("e0", slots=64)
    scheduler = make([engine], gate, lambda name: by_sample(name) if int(name.split("/")[0]) % 2 else 0.0, **config)

    async def body() -> None:
        for version in range(10):
            await take(scheduler, 2, version)
            engine.version = version + 1
            scheduler.advance(version + 1)
        assert scheduler.take_counters().groups_filtered >= 18

    within(scheduler, body())


def test_a_group_too_old_for_the_next_weights_is_given_up_with_all_its_responses() -> None:
    engine = TimedEngine("e0", slots=64, length_of=lambda key: 400 if key == "1/1" else 5)
    scheduler = make([engine], make_gate(1, 1, steps=4, max_staleness=0))

    async def body() -> None:
        assert [g.group_id for g in await take(scheduler, 1, 0)] == [0]
        await asyncio.sleep(4.0)
        async with scheduler.updating("v1"):
            engine.version = 1
        scheduler.advance(1)
        groups = await take(scheduler, 1, 1)
        assert groups[0].oldest_version == 1
        counters = scheduler.take_counters()
        assert (counters.groups_cancelled, counters.requests_cancelled) == (1, 1)
        assert counters.tokens_cancelled >= 5 + 9  # of the one that had ended, and of the one that had not
        assert engine.aborted == ["1/1"]

    within(scheduler, body())


def test_a_batch_loses_nothing_with_an_engine_and_reports_it() -> None:
    engines = [TimedEngine("e0", slots=64, dies_at_s=3.5), TimedEngine("e1", slots=64)]
    scheduler = make(engines, make_gate(4, 0, steps=1))

    async def body() -> None:
        groups = await take(scheduler, 4, 0)
        assert sum(len(g.trajectories) for g in groups) == 8
        counters = scheduler.take_counters()
        assert (counters.engines_lost, counters.requests_moved, counters.groups_dropped) == (1, 4, 0)
        assert scheduler.fleet.lost == {0}

    within(scheduler, body())
