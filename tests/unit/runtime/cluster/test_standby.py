"""The process that waits to take the place of a lost worker: used, filled again, lost while it waits or while it becomes the worker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.replaceable import ReplaceableWorker
from rljob_runtime.cluster.standby import MAX_LOSSES, Standby
from rljob_runtime.errors import StartupDeadlineError, WorkerFailedError, WorkerLostError
from tests.support.fake_workers import ServingEngine

SPEC = WorkerSpec(name="engine-0", factory="m:C", kwargs={}, node_rank=3)
WAITING = replace(SPEC, name="engine-standby-3")


class Process:
    """A fake process, waiting or a worker."""

    def __init__(self, cluster: "Processes", name: str) -> None:
        self.name, self._cluster = name, cluster
        self.gone = asyncio.Event()
        self.becomes: Callable[[WorkerSpec], Any] = lambda spec: ServingEngine(spec.name)

    async def become(self, spec: WorkerSpec, timeout_s: float) -> Any:
        self._cluster.log.append(f"{self.name} becomes {spec.name}")
        return self.becomes(spec)

    async def watch(self) -> None:
        await self.gone.wait()
        raise WorkerLostError(self.name, "signal 9", "standby.log")

    def end(self) -> None:
        self._cluster.log.append(f"{self.name} is ended")
        self.gone.set()


class Processes:
    """A fake cluster: standby processes are prepared when the test lets them, workers start at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.waiting: list[Process] = []
        self.prepared = asyncio.Event()
        self.prepared.set()
        self.fails: Exception | None = None

    async def start_standby(self, spec: WorkerSpec, timeout_s: float) -> Process:
        assert spec == WAITING
        process = Process(self, f"standby {len(self.waiting)}")
        self.waiting.append(process)
        try:
            await self.prepared.wait()
        except asyncio.CancelledError:
            self.log.append(f"{process.name} is given up")
            raise
        if self.fails is not None:
            raise self.fails
        self.log.append(f"{process.name} waits")
        return process

    async def start_workers(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Any]:
        assert list(specs) == [SPEC]
        self.log.append("a new process starts")
        return [ServingEngine("engine-0")]

    def end_workers(self, workers: Sequence[Any]) -> None:
        raise AssertionError(workers)

    async def settle(self, workers: Sequence[Any], timeout_s: float) -> None:
        self.log.append(f"{workers[0].name} is settled")


async def soon() -> None:
    """Let every task get as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def kept(cluster: Processes) -> AsyncIterator[tuple[ReplaceableWorker, list[str]]]:
    """A worker whose standby process is kept ready, and the lines for users."""
    lines: list[str] = []
    standby = Standby(WAITING, cluster, timeout_s=9.0, notify=lines.append)
    running = asyncio.ensure_future(standby.run())
    await soon()
    try:
        yield ReplaceableWorker(ServingEngine("engine-0"), SPEC, cluster, standby), lines
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert running.cancelled() or running.exception() is None


async def test_the_waiting_process_becomes_the_worker_and_another_one_waits_then() -> None:
    cluster = Processes()
    async with kept(cluster) as (worker, lines):
        await worker.restart(7.0)
        assert cluster.log == ["standby 0 waits", "standby 0 becomes engine-0", "engine-0 is settled"]
        await soon()
        await worker.restart(7.0)
        assert cluster.log[3:] == ["standby 1 waits", "standby 1 becomes engine-0", "engine-0 is settled"]
        await soon()
    assert cluster.log[6:] == ["standby 2 waits", "standby 2 is ended"]  # with the run: nothing stays behind
    assert lines == []


async def test_a_process_that_is_still_being_prepared_is_waited_for() -> None:
    cluster = Processes()
    cluster.prepared.clear()
    async with kept(cluster) as (worker, _):
        restarting = asyncio.ensure_future(worker.restart(7.0))
        await soon()
        assert cluster.log == []
        cluster.prepared.set()
        await restarting
        assert cluster.log == ["standby 0 waits", "standby 0 becomes engine-0", "engine-0 is settled"]


async def test_one_that_is_not_prepared_in_time_is_given_up() -> None:
    cluster = Processes()
    cluster.prepared.clear()
    async with kept(cluster) as (worker, lines):
        await worker.restart(0.01)
        assert cluster.log == ["standby 0 is given up", "a new process starts", "engine-0 is settled"]
        assert "engine-standby-3 did not become engine-0, which is started from scratch instead" in lines[0]


async def test_a_process_that_ends_while_it_waits_is_replaced_but_not_for_ever() -> None:
    cluster = Processes()
    async with kept(cluster) as (worker, lines):
        for index in range(MAX_LOSSES):
            cluster.waiting[index].gone.set()
            await soon()
        assert len(cluster.waiting) == MAX_LOSSES
        assert [line.rpartition(", and ")[2] for line in lines] == [
            *["another one takes its place"] * (MAX_LOSSES - 1),
            f"none takes its place after {MAX_LOSSES} in a row",
        ]
        assert "signal 9" in lines[0]
        await worker.restart(7.0)
        assert cluster.log[-2:] == ["a new process starts", "engine-0 is settled"]


async def test_processes_that_cannot_be_prepared_end_nothing_else() -> None:
    cluster = Processes()
    cluster.fails = WorkerFailedError("engine-standby-3", "prepare", "ImportError: libcuda", "standby.log")
    async with kept(cluster) as (worker, lines):
        assert len(lines) == MAX_LOSSES
        assert "ImportError: libcuda" in lines[0]
        await worker.restart(7.0)
        assert cluster.log == ["a new process starts", "engine-0 is settled"]


@pytest.mark.parametrize("fault", [WorkerLostError("engine-0", "signal 9", "engine.log"), StartupDeadlineError("not started")])
async def test_a_process_that_fails_while_it_becomes_the_worker_is_ended_and_a_new_one_started(fault: Exception) -> None:
    cluster = Processes()

    def fails(spec: WorkerSpec) -> Any:
        raise fault

    async with kept(cluster) as (worker, lines):
        cluster.waiting[0].becomes = fails
        await worker.restart(7.0)
        assert cluster.log[1:] == ["standby 0 becomes engine-0", "standby 0 is ended", "a new process starts", "engine-0 is settled"]
        assert str(fault) in lines[0]
        await soon()
        assert cluster.log[-1] == "standby 1 waits"


async def test_of_two_workers_lost_together_one_gets_the_process_and_one_is_started() -> None:
    cluster = Processes()
    async with kept(cluster) as (worker, _):
        await asyncio.gather(worker.restart(7.0), worker.restart(7.0))
        assert sorted(cluster.log) == sorted(
            ["standby 0 waits", "standby 0 becomes engine-0", "a new process starts", *["engine-0 is settled"] * 2]
        )


async def test_a_restart_that_is_cancelled_leaves_no_process() -> None:
    cluster = Processes()
    async with kept(cluster) as (worker, _):
        hangs = asyncio.Event()

        async def become(spec: WorkerSpec, timeout_s: float) -> Any:
            await hangs.wait()

        cluster.waiting[0].become = become  # type: ignore[method-assign]
        restarting = asyncio.ensure_future(worker.restart(7.0))
        await soon()
        restarting.cancel()
        await asyncio.wait([restarting])
        assert cluster.log[:2] == ["standby 0 waits", "standby 0 is ended"]
