"""Partial-device mode on the real scheduler, fleet, gate and buffer: engines pause and resume at any moment, nothing is lost."""

import asyncio
import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.fleet import EngineFleet, FleetConfig
from rljob_runtime.overlap.routing import AFFINITY_MARGIN, UNEVEN, CacheAffinity, Capacity, GroupAffinity, Router, places, surplus
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.records import Completion, GenerationRequest, Sampling
from tests.support.fake_workers import DrawingEngine
from tests.support.records import make_prompt
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.timed_engine import Fault, TimedEngine
from tests.support.virtual_time import run_virtual

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
                (segment,) = trajectory.segments
                assert segment.token_ids.tolist() == list(range(engines[0].length_of(f"{group.group_id}/{trajectory.sample_index}")))
                assert segment.logprobs.size == len(segment)
                edges = [0, *(span.end for span in segment.version_spans)]
                assert edges == [*(span.start for span in segment.version_spans), len(segment)]
                versions = [span.version for span in segment.version_spans]
                assert versions == sorted(set(versions))
    sent = Counter(request.request_id for engine in engines for request in engine.seen)
    assert set(sent.values()) == {1}
    assert len({r.seed for e in engines for r in e.seen if not r.request_id.count("+")}) == len([i for i in sent if "+" not in i])


class Asker:
    """Wants each response once."""

    priority = 1

    def __init__(self) -> None:
        self.got: dict[str, Completion] = {}

    def request_of(self, sample: Sample) -> GenerationRequest:
        return sample.request(Sampling(max_tokens=1000), 5)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        for sample, completion in finished:
            assert sample.key not in self.got
            self.got[sample.key] = completion


class Replacing:
    """Replaces lost engines after a while, as a supervisor does; the other half of engines may come back only so often."""

    def __init__(self, engines: list[TimedEngine], start_s: float, restarts: int) -> None:
        self.engines, self.start_s = engines, start_s
        self.left = dict.fromkeys(range(len(engines)), restarts) | {0: 1000}
        self.fleet: EngineFleet
        self.tasks: list[asyncio.Task[None]] = []

    def lost(self, index: int, error: WorkerLostError) -> bool:
        if not self.left[index]:
            return False
        self.left[index] -= 1
        self.tasks.append(asyncio.ensure_future(self.replace(index)))
        return True

    async def replace(self, index: int) -> None:
        await self.fleet.released(index)
        await asyncio.sleep(self.start_s)
        self.engines[index].restart()
        self.engines[index].version += 1
        self.fleet.rejoin(index)


FAULTS = st.lists(st.tuples(st.floats(0.0, 60.0), st.sampled_from(Fault)), max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    faults=st.lists(FAULTS, min_size=1, max_size=3),
    slots=st.integers(1, 4),
    start_s=st.sampled_from([0.0, 0.7, 12.0]),
    restarts=st.integers(0, 3),
    count=st.integers(1, 12),
    paused_at_s=st.none() | st.floats(0.0, 30.0),
    cancelled=st.integers(0, 2),
)
def test_engines_that_fail_hang_or_are_killed_at_any_moment_lose_and_double_no_response(
    faults: list[list[tuple[float, Fault]]],
    slots: int,
    start_s: float,
    restarts: int,
    count: int,
    paused_at_s: float | None,
    cancelled: int,
) -> None:
    lengths = {f"{i}/0": 1 + 7 * i % 23 for i in range(count)}
    engines = [
        TimedEngine(f"e{i}", slots=slots, token_s=0.5 + i, length_of=lengths.__getitem__, faults=own) for i, own in enumerate(faults)
    ]
    replacing, asker = Replacing(engines, start_s, restarts), Asker()
    samples = [Sample(owner=asker, group_id=i, index=0, prompt=make_prompt(i)) for i in range(count)]
    withdrawn: list[Sample] = []

    async def body() -> None:
        config = FleetConfig(capacities=(Capacity(slots=slots, queued=1),) * len(engines), stall_timeout_s=8.0)
        fleet = replacing.fleet = EngineFleet(engines, config=config, on_lost=replacing.lost)
        running = asyncio.ensure_future(fleet.run())
        fleet.add(samples)
        if paused_at_s is not None:
            await asyncio.sleep(paused_at_s)
            await fleet.pause([0], what="the trainer works")
            withdrawn.extend(s for s in samples[:cancelled] if s.key not in asker.got)
            fleet.cancel(withdrawn)
            await asyncio.sleep(1.0)
            fleet.resume([0])
        async with asyncio.timeout(3000.0):
            while len(asker.got) + len(withdrawn) < count:
                await asyncio.sleep(1.0)
        assert not running.done()
        assert fleet.num_running == fleet.num_waiting == 0 or withdrawn
        for task in (running, *replacing.tasks):
            task.cancel()
        await asyncio.wait([running, *replacing.tasks])

    run_virtual(body())
    assert set(asker.got) == set(lengths) - {s.key for s in withdrawn}
    for key, completion in asker.got.items():
        segment = completion.segment
        assert segment.token_ids.tolist() == list(range(lengths[key]))
        edges = [0, *(span.end for span in segment.version_spans)]
        assert edges == [*(span.start for span in segment.version_spans), len(segment)]
    sent = [request.request_id for engine in engines for request in engine.seen]
    assert len(set(sent)) == len(sent)
    if not withdrawn and all(fault is not Fault.KILLED for own in faults for _, fault in own):
        assert sum(engine.sampled_ever for engine in engines) == sum(lengths.values())  # what was sampled was kept


@given(
    affinities=st.lists(st.none() | st.builds(CacheAffinity, engine=st.integers(0, 5), tokens=st.integers(1, 500)), max_size=60),
    loads=st.dictionaries(st.integers(0, 4), st.integers(0, 12), max_size=5),
    limit=st.integers(1, 12),
    margin=st.sampled_from([0, AFFINITY_MARGIN]),
    request_tokens=st.sampled_from([1, 50, math.inf]),
    waiting_there=st.integers(1, 9),
)
def test_requests_go_to_their_engine_unless_another_engine_has_less_to_do_by_more_than_their_cached_tokens_cost(
    affinities: list[CacheAffinity | None], loads: dict[int, int], limit: int, margin: int, request_tokens: float, waiting_there: int
) -> None:
    now = dict(loads)
    router = Router(dict(loads), dict.fromkeys(loads, limit), margin=margin, request_tokens=request_tokens)
    for affinity in affinities:
        engine = router.place(affinity, waiting_there=waiting_there)
        least = min(now.values(), default=limit)
        at_preferred = None if affinity is None or not margin else now.get(affinity.engine)
        allowed = max(margin, affinity.tokens / request_tokens) if affinity is not None and margin else 0
        if engine is None:
            assert least >= limit or (at_preferred is not None and limit <= at_preferred <= least + allowed - waiting_there)
            continue
        assert now[engine] < limit
        if affinity is not None and engine == affinity.engine and margin:
            assert now[engine] <= least + allowed
        else:
            assert now[engine] == least
            assert at_preferred is None or at_preferred > least + allowed - (waiting_there if at_preferred >= limit else 0)
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
    requests = [m for m, (size, _, _) in zip(begun, groups, strict=True) for _ in range(size)]
    now = dict(loads)
    router = Router(dict(loads), dict.fromkeys(loads, limit), margin=margin)
    affinities = {m: m.engine for m in begun if m.engine in loads}  # an engine that is lost or paused is nobody's preferred engine
    own = {m: m.num_there for m in affinities}
    for group in requests:
        engine = router.place(None, group)
        least = min(now.values(), default=limit)
        if engine is None:
            assert least >= limit
            continue
        affinity = affinities.setdefault(group, engine)
        if engine != affinity:
            assert now[affinity] >= limit or now[affinity] - own[group] > least + margin
        now[engine] += 1
        assert now[engine] <= limit
        own[group] = own.get(group, 0) + (engine == affinity)
