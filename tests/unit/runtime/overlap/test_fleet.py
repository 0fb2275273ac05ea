"""The fleet with several owners: cancelled, reserved, lost, and given no more than what keeps slots busy."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from rljob_api.vocabulary import GroupRouting
from rljob_runtime.errors import WorkerLostError
from rljob_runtime.overlap.fleet import EngineFleet, FleetConfig, OnLost
from rljob_runtime.overlap.routing import Capacity, GroupAffinity
from rljob_runtime.overlap.samples import Sample, sample_seed
from rljob_runtime.records import Completion, GenerationRequest, Sampling
from tests.support.records import make_prompt
from tests.support.timed_engine import TimedEngine
from tests.support.virtual_time import run_virtual


@dataclass(eq=False)
class Client:
    """Takes what it asked for."""

    priority: int = 1
    prefix: str = ""
    got: dict[str, Completion] = field(default_factory=dict)
    at_s: dict[str, float] = field(default_factory=dict)

    def request_of(self, sample: Sample) -> GenerationRequest:
        return sample.request(Sampling(max_tokens=1000), 5)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        for sample, completion in finished:
            assert sample.key not in self.got
            self.got[sample.key] = completion
            self.at_s[sample.key] = asyncio.get_running_loop().time()

    def samples(self, groups: int, each: int = 1) -> list[Sample]:
        made = []
        for group in range(groups):
            affinity = GroupAffinity()
            made += [
                Sample(owner=self, group_id=group, index=i, prompt=make_prompt(group), prefix=self.prefix, affinity=affinity)
                for i in range(each)
            ]
        return made


CAPACITY = Capacity(slots=4)


def within(
    engines: list[TimedEngine],
    body: Callable[[EngineFleet], Coroutine[Any, Any, None]],
    capacity: Capacity = CAPACITY,
    on_lost: OnLost | None = None,
    **config: Any,
) -> None:
    """Run ``body`` beside a fleet of these engines."""

    async def main() -> None:
        settings = FleetConfig(capacities=(capacity,) * len(engines), **{"stall_timeout_s": 100.0} | config)
        fleet = EngineFleet(engines, config=settings, on_lost=on_lost)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(fleet.run())
            await asyncio.sleep(0)
            await body(fleet)
            running.cancel()

    run_virtual(main())


def test_what_is_cancelled_frees_its_place_and_never_comes_back() -> None:
    engine, client = TimedEngine("e0", slots=2, length_of=lambda key: 10), Client()
    samples = client.samples(5)

    async def body(fleet: EngineFleet) -> None:
        fleet.add(samples)
        await asyncio.sleep(3.5)
        assert fleet.cancel([samples[0], samples[4]]) == 2
        assert fleet.cancel([samples[0], samples[4]]) == 0
        assert fleet.num_waiting == 2
        await asyncio.sleep(60.0)
        counts = fleet.take_counts()
        assert (counts.requests_cancelled, counts.tokens_cancelled) == (2, 3)
        assert fleet.num_running == fleet.num_waiting == 0
        assert fleet.cancel(samples) == 0

    within([engine], body, Capacity(slots=2))
    assert list(client.got) == ["1/0", "2/0", "3/0"]
    assert engine.aborted == ["0/0"]


def test_tokens_of_earlier_parts_count_as_lost_when_a_waiting_request_is_cancelled() -> None:
    engine, client = TimedEngine("e0", length_of=lambda key: 10), Client()
    samples = client.samples(1)

    async def body(fleet: EngineFleet) -> None:
        fleet.add(samples)
        await asyncio.sleep(4.5)
        await fleet.pause([0], what="test")
        assert fleet.num_waiting == 1
        fleet.cancel(samples)
        fleet.resume([0])
        await asyncio.sleep(30.0)
        assert fleet.take_counts().tokens_cancelled == 4

    within([engine], body)
    assert not client.got


def test_a_lost_engines_requests_continue_elsewhere_with_the_tokens_and_seeds_they_had() -> None:
    engines = [TimedEngine("e0", length_of=lambda key: 12, dies_at_s=8.5), TimedEngine("e1", length_of=lambda key: 12)]
    client = Client()
    samples = client.samples(3)
    lost = []

    async def body(fleet: EngineFleet) -> None:
        await fleet.pause([1], what="all begin at e0")
        fleet.add(samples)
        await asyncio.sleep(3.5)
        await fleet.pause([0], what="three tokens are known")
        fleet.resume([0])
        await asyncio.sleep(2.0)  # two or so are sampled there, and lost
        fleet.resume([1])
        await asyncio.sleep(60.0)
        assert fleet.lost == {0}
        counts = fleet.take_counts()
        assert (counts.engines_lost, counts.requests_moved) == (1, 3)
        fleet.resume([0])
        await fleet.pause([0], what="a lost one is skipped")

    within(engines, body, on_lost=lambda index, error: lost.append((index, str(error))))
    assert lost == [(0, "worker e0 is gone (signal 9); its log: engine.log")]
    assert all(client.got[s.key].segment.token_ids.tolist() == list(range(12)) for s in samples)
    again = [request for request in engines[1].seen if request.request_id.endswith("+2")]
    assert {request.seed for request in again} == {sample_seed(5, s.prompt.index, s.index, 3) for s in samples}


def test_an_overloaded_engine_gives_its_latest_requests_to_one_that_joins() -> None:
    engines, client = [TimedEngine("e0", slots=6, length_of=lambda key: 10) for _ in range(2)], Client()
    samples = client.samples(6)

    async def body(fleet: EngineFleet) -> None:
        await fleet.pause([1], what="all begin at e0")
        fleet.add(samples)
        await asyncio.sleep(2.5)
        fleet.resume([1])
        await asyncio.sleep(1.0)
        assert engines[0].aborted == ["3/0", "4/0", "5/0"]
        fleet.resume([1])
        await asyncio.sleep(60.0)
        assert len(engines[0].aborted) == 3

    within(engines, body, Capacity(slots=6))
    assert {key: got.segment.token_ids.tolist() for key, got in client.got.items()} == {sample.key: list(range(10)) for sample in samples}
    assert {request.request_id for request in engines[1].seen} <= {"3/0+1", "4/0+1", "5/0+1"}
    assert len(engines[1].seen) >= 2


def test_the_last_engines_loss_is_an_error_and_any_where_losses_are_not_survived() -> None:
    async def body(fleet: EngineFleet) -> None:
        fleet.add(Client().samples(4))
        await asyncio.sleep(50.0)

    dying = [TimedEngine("e0", dies_at_s=1.0), TimedEngine("e1", dies_at_s=2.0)]
    with pytest.raises(ExceptionGroup) as caught:
        within(dying, body)
    assert caught.group_contains(WorkerLostError, match="e1 is gone", depth=None)
    with pytest.raises(ExceptionGroup) as caught:
        within([TimedEngine("e0", dies_at_s=1.0), TimedEngine("e1")], body, survives_engine_loss=False)
    assert caught.group_contains(WorkerLostError, match="e0 is gone", depth=None)


def test_an_idle_engine_whose_loss_somebody_else_noticed_is_given_nothing() -> None:
    engines, client = [TimedEngine("e0"), TimedEngine("e1")], Client()

    async def body(fleet: EngineFleet) -> None:
        error = WorkerLostError("e0", "signal 9", "e0.log")
        fleet.lose(0, error)
        fleet.lose(0, error)
        fleet.add(client.samples(3))
        await asyncio.sleep(20.0)
        assert fleet.take_counts().engines_lost == 1
        with pytest.raises(WorkerLostError, match="e1"):
            fleet.lose(1, WorkerLostError("e1", "signal 9", "e1.log"))

    within(engines, body)
    assert len(client.got) == 3
    assert not engines[0].seen


def test_validation_goes_before_training_and_leaves_its_running_responses_alone() -> None:
    engine = TimedEngine("e0", slots=1, length_of=lambda key: 5)
    training, validation = Client(), Client(priority=0, prefix="v3/")

    async def body(fleet: EngineFleet) -> None:
        fleet.add(training.samples(3))
        await asyncio.sleep(2.0)
        fleet.add(validation.samples(2))
        await asyncio.sleep(60.0)

    within([engine], body, Capacity(slots=1))
    assert [r.request_id for r in engine.seen] == ["0/0", "v3/0/0", "v3/1/0", "1/0", "2/0"]
    assert list(validation.got) == ["v3/0/0", "v3/1/0"]
    assert len(training.got) == 3


def test_a_reservation_sends_others_back_to_wait_and_they_go_on_with_their_tokens() -> None:
    engine = TimedEngine("e0", slots=2, length_of=lambda key: 3 if key.startswith("v") else 20)
    training, validation = Client(), Client(priority=0, prefix="v3/")

    async def body(fleet: EngineFleet) -> None:
        fleet.add(training.samples(3))
        await asyncio.sleep(4.5)
        async with fleet.reserved(validation, what="validation of weights v3") as change:
            assert (change.moved, change.kept_tokens) == (2, 8)
            with pytest.raises(ValueError, match="reserved already"):
                async with fleet.reserved(training, what="another"):
                    pass
            fleet.add(validation.samples(1))
            await asyncio.sleep(50.0)
            assert list(validation.got) == ["v3/0/0"]
            assert not engine.running
            assert not training.got
        await asyncio.sleep(60.0)

    within([engine], body, Capacity(slots=2))
    assert all(completion.segment.token_ids.tolist() == list(range(20)) for completion in training.got.values())
    assert len(training.got) == 3


@pytest.mark.parametrize(("routing", "engines_of_a_group"), [(GroupRouting.TOGETHER, 1), (GroupRouting.SPREAD, 3)])
def test_a_group_stays_at_one_engine_or_spreads(routing: GroupRouting, engines_of_a_group: int) -> None:
    engines, client = [TimedEngine(f"e{i}", slots=12) for i in range(3)], Client()

    async def body(fleet: EngineFleet) -> None:
        fleet.add(client.samples(6, each=6))
        await asyncio.sleep(30.0)

    within(engines, body, Capacity(slots=12), group_routing=routing)
    for group in range(6):
        homes = {e.name for e in engines for r in e.seen if r.request_id.startswith(f"{group}/")}
        assert len(homes) == engines_of_a_group
    assert [len(e.seen) for e in engines] == [12, 12, 12]


def test_no_request_waits_at_a_busy_engine_while_another_one_has_a_free_slot() -> None:
    lengths = {f"{i}/0": 50 if i == 0 else 5 for i in range(12)}
    engines, client = [TimedEngine(f"e{i}", slots=1, length_of=lengths.__getitem__) for i in range(2)], Client()

    async def body(fleet: EngineFleet) -> None:
        fleet.add(client.samples(12))
        await asyncio.sleep(200.0)

    within(engines, body, Capacity(slots=1, queued=4))
    assert max(client.at_s.values()) <= 50 + 5 + 3  # bound early, four more would follow the long one
