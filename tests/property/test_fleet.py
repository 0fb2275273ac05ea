"""Partial-device mode on the real scheduler, fleet, gate and buffer: engines step aside and come back at any moment, nothing is lost."""

import asyncio
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.routing import AFFINITY_MARGIN, UNEVEN, Capacity, GroupAffinity, places, route, surplus
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.records import Sampling
from tests.support.fake_workers import DrawingEngine
from tests.support.rollouts import make_gate, make_scheduler

MAX_TOKENS = 6


def make(engines: list[DrawingEngine], *, batch: int, steps: int, lag: float, limit: int, queued: int, drains: bool) -> RolloutScheduler:
    return make_scheduler(
        engines,
        make_gate(batch, lag, steps),
        rollout={"sampling": Sampling(max_tokens=MAX_TOKENS), "drains": drains, "drain_timeout_s": 30.0},
        fleet={"capacities": (Capacity(slots=limit, queued=queued),) * len(engines)},
    )


async def train(
    scheduler: RolloutScheduler,
    engines: list[DrawingEngine],
    shared: list[int],
    *,
    batch: int,
    steps: int,
    drains: bool,
    rng: random.Random,
) -> list[list[Group]]:
    """The driver's loop in partial-device mode; the engines of ``shared`` are aside while the trainer works."""
    running = asyncio.ensure_future(scheduler.run())
    await asyncio.sleep(0)
    scheduler.open()
    taken = []
    for step in range(steps):
        for index in shared:
            engines[index].aside = False
        scheduler.resume(shared)
        groups = await scheduler.buffer.take(batch, version=step, timeout_s=20.0, what=f"batch of step {step + 1}")
        await scheduler.pause(shared, f"step {step + 1}")
        for index in shared:
            assert not engines[index].running
            engines[index].aside = True
        for _ in range(rng.randrange(6)):  # the trainer works, the others go on
            await asyncio.sleep(0)
        taken.append(groups)
        scheduler.trained(groups)
        async with scheduler.updating(f"v{step + 1}"):
            for engine in engines:
                assert not (drains and engine.running)
                engine.version = step + 1
        scheduler.advance(step + 1)
    running.cancel()
    return taken


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 4),
    steps=st.integers(1, 6),
    lag=st.sampled_from([0, 0.5, 1, 2, 2.5]),
    num_engines=st.integers(1, 4),
    limit=st.integers(1, 6),
    queued=st.integers(0, 3),
    drains=st.booleans(),
    data=st.data(),
)
def test_every_response_is_whole_once_and_fresh_enough_while_engines_come_and_go(
    seed: int, batch: int, steps: int, lag: float, num_engines: int, limit: int, queued: int, drains: bool, data: st.DataObject
) -> None:
    shared = sorted(data.draw(st.sets(st.integers(0, num_engines - 1))))
    engines = [DrawingEngine(f"engine-{i}", seed + i, length=MAX_TOKENS) for i in range(num_engines)]
    scheduler = make(engines, batch=batch, steps=steps, lag=lag, limit=limit, queued=queued, drains=drains)
    taken = asyncio.run(train(scheduler, engines, shared, batch=batch, steps=steps, drains=drains, rng=random.Random(seed)))
    counters = scheduler.take_counters()
    assert counters.groups_dropped == 0
    assert not (drains and counters.requests_moved)
    assert set(Counter(g.group_id for groups in taken for g in groups).values()) == {1}
    assert sum(map(len, taken)) == batch * steps
    for step, groups in enumerate(taken):
        for group in groups:
            assert 0 <= step - group.oldest_version <= -(-lag // 1)
            for trajectory in group.trajectories:
                completion = trajectory.completion
                assert completion.token_ids == tuple(range(engines[0].length_of(completion.request_id)))
                assert len(completion.logprobs) == len(completion.token_ids)
                edges = [0, *(span.end for span in completion.version_spans)]
                assert edges == [*(span.start for span in completion.version_spans), len(completion.token_ids)]
                versions = [span.version for span in completion.version_spans]
                assert versions == sorted(set(versions))
    sent = Counter(request.request_id for engine in engines for request in engine.seen)
    assert set(sent.values()) == {1}
    assert len({r.seed for e in engines for r in e.seen if not r.request_id.count("+")}) == len([i for i in sent if "+" not in i])


@given(
    homes=st.lists(st.none() | st.integers(0, 5), max_size=60),
    loads=st.dictionaries(st.integers(0, 4), st.integers(0, 12), max_size=5),
    limit=st.integers(1, 12),
    margin=st.sampled_from([0, AFFINITY_MARGIN]),
)
def test_requests_go_home_unless_another_engine_has_clearly_less_to_do(
    homes: list[int | None], loads: dict[int, int], limit: int, margin: int
) -> None:
    now = dict(loads)
    for home, engine in zip(homes, route(homes, loads, dict.fromkeys(loads, limit), margin), strict=True):
        least = min(now.values(), default=limit)
        if engine is None:
            assert least >= limit
            continue
        assert now[engine] < limit
        assert now[engine] <= least + (margin if engine == home else 0)
        if margin and home in now and now[home] < limit:
            assert engine == home or now[home] > least + margin
        now[engine] += 1


@given(loads=st.dictionaries(st.integers(0, 6), st.integers(0, 50), max_size=7), waiting=st.integers(0, 50))
def test_only_clearly_overloaded_engines_give_requests_away_and_never_below_their_share(loads: dict[int, int], waiting: int) -> None:
    over = surplus(loads, waiting, dict.fromkeys(loads, Capacity(slots=4)))
    even = -(-(sum(loads.values()) + waiting) // max(len(loads), 1))
    for engine, load in loads.items():
        assert (engine in over) == (load > UNEVEN * even)
        assert load - over.get(engine, 0) >= min(even, load)


LOADS = st.dictionaries(st.integers(0, 4), st.integers(0, 12), max_size=5)


@given(waiting=st.integers(0, 80), loads=LOADS, slots=st.integers(1, 8), queued=st.integers(0, 6))
def test_free_slots_are_filled_first_and_queues_only_while_enough_wait(
    waiting: int, loads: dict[int, int], slots: int, queued: int
) -> None:
    within, beyond = places(waiting, loads, dict.fromkeys(loads, Capacity(slots=slots, queued=queued)))
    free = sum(max(slots - load, 0) for load in loads.values())
    assert within == min(waiting, free)
    left = waiting - within - beyond
    assert left >= 0
    if beyond:
        assert left >= queued * len(loads)
    elif within == free and loads:  # nothing beyond: too few wait, or all queues are full
        assert left <= queued * len(loads) or all(load >= slots + queued for load in loads.values() if load >= slots) or queued == 0
    filled = [max(load, slots) for load in loads.values()] if beyond else []
    assert beyond <= sum(max(slots + queued - load, 0) for load in filled)


@given(
    groups=st.lists(st.tuples(st.integers(1, 8), st.none() | st.integers(0, 8), st.integers(0, 3)), max_size=8),
    loads=LOADS,
    limit=st.integers(1, 40),
    margin=st.sampled_from([0, AFFINITY_MARGIN]),
)
def test_a_group_stays_together_unless_its_engine_is_full_or_busier_with_others(
    groups: list[tuple[int, int | None, int]], loads: dict[int, int], limit: int, margin: int
) -> None:
    begun = [GroupAffinity(engine, num_there) for (_, engine, num_there) in groups]
    affinity = [m for m, (size, _, _) in zip(begun, groups, strict=True) for _ in range(size)]
    chosen = route([None] * len(affinity), loads, dict.fromkeys(loads, limit), margin, affinity)
    assert [(m.engine, m.num_there) for m in begun] == [(engine, num_there) for _, engine, num_there in groups]
    now = dict(loads)
    homes = {m: m.engine for m in begun if m.engine in loads}  # an engine that is lost or paused is nobody's home
    own = {m: m.num_there for m in homes}
    for group, engine in zip(affinity, chosen, strict=True):
        least = min(now.values(), default=limit)
        if engine is None:
            assert least >= limit
            continue
        home = homes.setdefault(group, engine)
        if engine != home:
            assert now[home] >= limit or now[home] - own[group] > least + margin
        now[engine] += 1
        assert now[engine] <= limit
        own[group] = own.get(group, 0) + (engine == home)
