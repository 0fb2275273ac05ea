"""Jobs whose writes hang, for example in an admission webhook, hold up no others; the load stays bounded."""

import asyncio
import itertools

import pytest

from rljob_operator.errors import UnansweredError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key, Manifest
from rljob_operator.protocol import Kind
from rljob_operator.workqueue import NUM_SLOW, PATIENCE_S, WorkQueue
from tests.unit.operator.shell.virtual_time import now, run
from tests.unit.operator.shell.world import World, rljob

WORKERS = 8
HANG_S = 34.0
HEALTHY = Key(namespace="well", name="healthy")


class Cluster:
    """Reconciles of namespace "ill" hang, all others take a moment."""

    def __init__(self) -> None:
        self.is_ill = True
        self.waits_s: list[float] = []
        """How long each reconcile of other namespaces waited for its start."""
        self.added_s = 0.0
        self.ended: list[Key] = []
        self.hanging = self.most_hanging = 0

    async def reconcile(self, key: Key) -> None:
        if key.namespace != "ill" or not self.is_ill:
            self.waits_s.append(asyncio.get_running_loop().time() - self.added_s)
            await asyncio.sleep(0.01)
            return
        self.hanging += 1
        self.most_hanging = max(self.most_hanging, self.hanging)
        try:
            await asyncio.sleep(HANG_S)
            self.ended.append(key)
            raise UnansweredError("create RayJob", 0, "no answer within 35 s")
        finally:
            self.hanging -= 1

    async def add(self, queue: WorkQueue, key: Key = HEALTHY) -> float:
        """Add a key; returns how long it waited."""
        self.added_s, before = asyncio.get_running_loop().time(), len(self.waits_s)
        queue.add(key)
        while len(self.waits_s) == before:
            await asyncio.sleep(0.001)
        return self.waits_s[-1]


def _ill(number: int) -> list[Key]:
    return [Key(namespace="ill", name=f"ill-{index}") for index in range(number)]


def _queue(cluster: Cluster) -> WorkQueue:
    queue = WorkQueue(cluster.reconcile, workers=WORKERS, metrics=Metrics(), clock=now, jitter=lambda: 0.0)
    queue.start()
    return queue


@pytest.mark.parametrize("number", [WORKERS, 100])
def test_a_healthy_job_waits_for_hanging_ones_only_until_they_are_known(number: int):
    async def scenario() -> tuple[float, list[float], Cluster]:
        cluster = Cluster()
        queue = _queue(cluster)
        for key in _ill(number):
            queue.add(key)
        first_s = await cluster.add(queue)
        later_s = []
        for _ in range(300):
            await asyncio.sleep(1.0)
            later_s.append(await cluster.add(queue))
        await queue.stop(0.0)
        return first_s, later_s, cluster

    first_s, later_s, cluster = run(scenario())
    assert first_s <= PATIENCE_S * (number / WORKERS) + 0.1
    assert max(later_s) < 0.1
    assert cluster.most_hanging <= WORKERS + NUM_SLOW
    assert set(cluster.ended) == set(_ill(number)), "each gets the time that the API server takes to answer"


def test_a_job_that_hangs_no_more_leaves_the_lane():
    async def scenario() -> float:
        cluster = Cluster()
        queue = _queue(cluster)
        recovered, *others = _ill(NUM_SLOW + 1)
        queue.add(recovered)
        await asyncio.sleep(HANG_S + 0.05)
        cluster.is_ill = False
        await asyncio.sleep(1.0)  # the retry succeeds
        cluster.is_ill = True
        for key in others:
            queue.add(key)
        await asyncio.sleep(10 * PATIENCE_S)
        assert cluster.hanging == NUM_SLOW
        cluster.is_ill = False
        waited_s = await cluster.add(queue, recovered)
        await queue.stop(0.0)
        return waited_s

    assert run(scenario()) < 0.1


def test_one_reconcile_of_a_key_at_a_time_and_an_event_meanwhile_causes_one_more():
    async def scenario() -> list[tuple[float, float]]:
        spans: list[tuple[float, float]] = []

        async def look(key: Key) -> None:
            began_s = asyncio.get_running_loop().time()
            await asyncio.sleep(10.0)
            spans.append((began_s, asyncio.get_running_loop().time()))

        queue = WorkQueue(look, workers=2, metrics=Metrics(), clock=now, jitter=lambda: 0.0)
        queue.start()
        for _ in range(5):
            queue.add(HEALTHY)
            await asyncio.sleep(3.0)
        await asyncio.sleep(100.0)
        await queue.stop(0.0)
        return spans

    spans = run(scenario())
    assert [began for began, _ in spans] == [0.0, 10.0, 20.0]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


def test_stopping_finishes_what_the_lane_runs_and_starts_nothing_there():
    async def scenario() -> tuple[list[Key], float]:
        cluster = Cluster()
        queue = _queue(cluster)
        for key in _ill(NUM_SLOW + 4):
            queue.add(key)
        await asyncio.sleep(10 * PATIENCE_S)
        await queue.stop(60.0)
        assert not queue.is_alive
        return cluster.ended, asyncio.get_running_loop().time()

    ended, at_s = run(scenario())
    assert len(ended) == NUM_SLOW
    assert at_s <= HANG_S + 2 * PATIENCE_S


@pytest.mark.parametrize("num_ill", [WORKERS, 40])
def test_a_webhook_that_hangs_for_some_jobs_delays_no_other_job(num_ill: int, monkeypatch: pytest.MonkeyPatch):
    """The whole of queue, reconciler and API server, where creating the RayJobs of some jobs hangs."""

    async def scenario() -> tuple[World, float]:
        world, created = World(), asyncio.Event()
        create = world.kube.create

        async def behind_a_webhook(manifest: Manifest) -> Manifest:
            if manifest["kind"] == Kind.RAYJOB and manifest["metadata"]["name"].startswith("ill-"):
                await asyncio.sleep(HANG_S)
                raise UnansweredError("create RayJob", 0, "no answer within 35 s")
            stored = await create(manifest)
            if manifest["metadata"]["name"] == "healthy-a1":
                created.set()
            return stored

        monkeypatch.setattr(world.kube, "create", behind_a_webhook)
        for index in range(num_ill):
            world.kube.add(rljob(f"ill-{index}"))
        await world.boot()
        queue = WorkQueue(world.reconciler.reconcile, workers=WORKERS, metrics=world.metrics, clock=now, jitter=lambda: 0.0)
        queue.start()
        for key in world.cache.keys():
            queue.add(key)
        await asyncio.sleep(100.0)
        world.kube.add(rljob("healthy"))
        world.deliver()
        began_s = asyncio.get_running_loop().time()
        queue.add(Key(namespace="team", name="healthy"))
        await created.wait()
        waited_s = asyncio.get_running_loop().time() - began_s
        await queue.stop(0.0)
        return world, waited_s

    world, waited_s = run(scenario())
    assert waited_s < 0.1
    assert world.condition("Running", "ill-0") == ("False", "ApiUnavailable"), "reported meanwhile"
