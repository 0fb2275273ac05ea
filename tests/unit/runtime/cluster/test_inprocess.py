"""InProcessWorker keeps what the protocol of workers promises."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.errors import CallDeadlineError, DataError, WorkerFailedError, WorkerLostError
from tests.support.pace import HANG_S


class Target:
    """Answers, late or not at all."""

    def __init__(self) -> None:
        self.done: list[object] = []
        self.go = threading.Event()

    def add(self, left: int, right: int) -> int:
        self.done.append((left, right))
        return left + right

    def wait(self) -> None:
        self.go.wait(HANG_S)
        self.done.append("waited")

    def fail(self) -> None:
        raise LookupError("x")

    def refuse(self) -> None:
        raise DataError("no rows")


@pytest.fixture
def target() -> Target:
    return Target()


@pytest.fixture
def worker(target: Target) -> Iterator[InProcessWorker]:
    found = InProcessWorker("a-0", target, log_file="a-0.log")
    yield found
    target.go.set()
    found.stop()


def test_values_calls_as_arguments_and_order(worker: InProcessWorker, target: Target) -> None:
    async def main() -> None:
        typed: Worker = worker
        one = typed.start("add", 1, 2)
        assert await gather_all([typed.start("add", one, 10), one], 5) == [13, 3]
        assert await typed.call("add", 1, 1, timeout_s=5) == 2
        assert target.done == [(1, 2), (3, 10), (1, 1)]

    asyncio.run(main())


def test_errors_come_as_from_a_process(worker: InProcessWorker) -> None:
    async def main() -> None:
        with pytest.raises(WorkerFailedError, match=r"worker a-0 failed in fail: LookupError: x; its log: a-0.log"):
            await worker.call("fail", timeout_s=5)
        with pytest.raises(WorkerFailedError, match="AttributeError"):
            await worker.call("unknown", timeout_s=5)
        with pytest.raises(DataError, match="no rows"):
            await worker.call("refuse", timeout_s=5)

    asyncio.run(main())


def test_a_wait_ends_at_its_deadline_and_the_call_goes_on(worker: InProcessWorker, target: Target) -> None:
    async def main() -> None:
        with pytest.raises(CallDeadlineError, match=r"worker a-0 did not finish wait within 0.1 s"):
            await worker.call("wait", timeout_s=0.1)
        assert target.done == []
        later = worker.start("add", 1, 2)
        target.go.set()
        assert await later.result(HANG_S) == 3
        assert target.done == ["waited", (1, 2)]

    asyncio.run(main())


def test_a_stopped_worker_is_lost(worker: InProcessWorker, target: Target) -> None:
    async def main() -> None:
        worker.start("wait")
        queued = worker.start("add", 1, 2)
        asyncio.get_running_loop().call_later(0.05, target.go.set)
        await asyncio.to_thread(worker.stop)
        with pytest.raises(WorkerLostError, match=r"worker a-0 is gone \(stopped\)"):
            await queued.result(5)
        with pytest.raises(WorkerLostError):
            worker.start("add", 1, 2)
        worker.stop()

    asyncio.run(main())
