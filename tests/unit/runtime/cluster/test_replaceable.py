"""One worker over several processes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.replaceable import ReplaceableWorker
from rljob_runtime.errors import StartupDeadlineError, WorkerLostError
from tests.support.fake_workers import ServingEngine

SPEC = WorkerSpec(name="engine-0", factory="m:C", kwargs={}, node_rank=3)


class Starting:
    """Starts workers; the second one does not come up."""

    def __init__(self) -> None:
        self.made: list[Any] = [ServingEngine("engine-0")]
        self.log: list[str] = []

    async def start_workers(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Any]:
        assert list(specs) == [SPEC]
        assert self.made[-1].lost.is_set(), "two processes on one device"
        self.log.append(f"start within {timeout_s:.0f} s")
        if self.log.count(self.log[-1]) == 1:
            raise StartupDeadlineError("engine-0 did not finish start within 7 s")
        self.made.append(ServingEngine("engine-0"))
        return [self.made[-1]]

    def end_workers(self, workers: Sequence[Any]) -> None:
        self.log.append("end")
        for worker in workers:
            worker.lost.set()

    async def settle(self, workers: Sequence[Any], timeout_s: float) -> None:
        self.log.append(f"settle {[worker.name for worker in workers]}")


async def test_calls_go_to_the_process_that_runs_now() -> None:
    cluster = Starting()
    worker = ReplaceableWorker(cluster.made[0], SPEC, cluster)
    watching = asyncio.ensure_future(worker.watch())
    await worker.call("begin_update", None, 1, timeout_s=1.0)
    await worker.end()
    with pytest.raises(WorkerLostError, match="engine-0"):
        await watching
    with pytest.raises(StartupDeadlineError):
        await worker.restart(7.0)
    await worker.restart(7.0)
    await worker.call("begin_update", None, 2, timeout_s=1.0)
    assert [made.phases for made in cluster.made] == [["begin v1"], ["begin v2"]]
    assert cluster.log == ["end", "start within 7 s", "start within 7 s", "settle ['engine-0']"]
    assert (worker.name, worker.log_file) == ("engine-0", "engine.log")
