"""Which workers go on after another was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rljob_api.v1alpha1.components import Role
from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import NodeLostError, WorkerLostError
from rljob_runtime.job.restarting import CLEAR_TIMEOUT_S, Restarts, end_others, start_again
from rljob_runtime.loop.workers import Component, JobWorkers
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.worker_group import WorkerGroup
from tests.support.fake_workers import Answered


class FakeWorker:
    """Ends when asked to, and notes what it was asked."""

    log_file = "worker.log"

    def __init__(self, name: str, *, dead: bool = False) -> None:
        self.name = name
        self.dead = dead
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.ended = asyncio.Event()

    def start(self, method: str, *args: Any) -> Answered:
        def answer() -> None:
            self.asked.append((method, args))
            if self.dead:
                raise WorkerLostError(self.name, "signal 9", self.log_file)

        return Answered(answer)

    async def watch(self) -> None:
        await self.ended.wait()
        raise WorkerLostError(self.name, "ended", self.log_file)


class FakeCluster:
    """Ends workers at once; loses a node when asked to."""

    def __init__(self) -> None:
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def lost_node(self) -> str:
        return await self.gone

    def end_workers(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.ended.set()


def component(role: Role, worker: FakeWorker) -> Component:
    survivable = role in (Role.ROLLOUT, Role.ENVIRONMENT)
    group = WorkerGroup(role.value, [worker], timeout_s=1.0, arbiter=None, clients=None)
    return Component(role=role, group=group, phase="{step}", survivable=survivable)


ROLES = (Role.TRAINER, Role.ROLLOUT, Role.REFERENCE, Role.REWARD, Role.JUDGE)


def made(dead: Role, arbiter: DeviceArbiter | None = None) -> tuple[dict[Role, FakeWorker], JobWorkers, WorkerLostError]:
    workers = {role: FakeWorker(f"{role.value}-0", dead=role is dead) for role in ROLES}
    job = JobWorkers(components=tuple(component(role, worker) for role, worker in workers.items()), arbiter=arbiter)
    return workers, job, WorkerLostError(workers[dead].name, "signal 9", "worker.log")


@pytest.mark.parametrize("lost", [Role.TRAINER, Role.REWARD, Role.REFERENCE, Role.JUDGE])
def test_what_was_not_lost_and_holds_nothing_of_the_run_goes_on(lost: Role) -> None:
    async def run() -> None:
        workers, job, error = made(lost)
        kept = await end_others(job, FakeCluster(), error)
        stays = {Role.ROLLOUT, Role.REFERENCE, Role.JUDGE} - {lost}
        assert set(kept) == {role.value for role in stays}
        assert {role for role, worker in workers.items() if not worker.ended.is_set()} == stays
        assert workers[Role.ROLLOUT].asked == [("clear", (CLEAR_TIMEOUT_S,))]
        assert ("close", ()) in workers[Role.REWARD].asked, "its scoring processes end with it"

    asyncio.run(run())


def test_an_engine_that_does_not_answer_starts_again_as_well() -> None:
    async def run() -> None:
        workers, job, error = made(Role.TRAINER)
        workers[Role.ROLLOUT].dead = True
        kept = await end_others(job, FakeCluster(), error)
        assert Role.ROLLOUT.value not in kept
        assert workers[Role.ROLLOUT].ended.is_set()

    asyncio.run(run())


def test_where_components_share_devices_all_start_again() -> None:
    async def run() -> None:
        workers, job, error = made(Role.TRAINER, arbiter=DeviceArbiter({}))
        assert await end_others(job, FakeCluster(), error) == {}
        assert all(worker.ended.is_set() for worker in workers.values())

    asyncio.run(run())


def test_what_starts_again_is_given_up_when_its_node_turns_out_to_be_gone() -> None:
    async def run() -> None:
        _, job, error = made(Role.TRAINER)
        assert await start_again(asyncio.sleep(0, job), FakeCluster(), error) is job
        cluster = FakeCluster()
        hangs = asyncio.Event()

        async def never() -> JobWorkers:
            try:
                await asyncio.Event().wait()
            finally:
                hangs.set()
            return job

        cluster.gone.set_result("node 3 of group train is gone")
        with pytest.raises(NodeLostError, match=r"worker Trainer-0 is gone \(signal 9; node 3 of group train is gone\)"):
            await start_again(never(), cluster, error)
        assert hangs.is_set(), "nothing goes on starting"

    asyncio.run(run())


def test_restarts_are_limited_and_reported_and_none_follows_a_lost_node_or_an_engine() -> None:
    said: list[str] = []
    _, job, error = made(Role.TRAINER)
    restarts = Restarts(2, said.append)
    assert not restarts.take(NodeLostError("Trainer-0", "its node is gone", "worker.log"), job)
    assert not restarts.take(WorkerLostError("Rollout-0", "signal 9", "worker.log"), job)
    assert said == []
    assert [restarts.take(error, job) for _ in range(3)] == [True, True, False]
    assert [line.rpartition("; ")[2] for line in said] == [
        "going on from the newest checkpoint, restart 1 of 2",
        "going on from the newest checkpoint, restart 2 of 2",
        "all 2 restarts of this attempt are used (spec.failurePolicy.maxWorkerRestarts)",
    ]
    assert not Restarts(0, said.append).take(error, job)
