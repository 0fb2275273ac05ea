"""A worker's watches, over an actor handle that counts calls."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from rljob_runtime.cluster.ray_cluster import RayWorker
from tests.support.pace import HANG_S


class Reference:
    """Ray's object reference by its protocol: any number may wait for it."""

    def __init__(self) -> None:
        self.answer: Future[None] = Future()

    def future(self) -> Future[None]:
        waiting: Future[None] = Future()
        self.answer.add_done_callback(lambda answer: waiting.set_result(answer.result()) if not waiting.cancelled() else None)
        return waiting


class Method:
    """A method of the actor."""

    def __init__(self) -> None:
        self.calls: list[Reference] = []

    def options(self, *, concurrency_group: str) -> Method:
        return self

    def remote(self, *args: Any) -> Reference:
        self.calls.append(Reference())
        return self.calls[-1]


class Actor:
    """An actor handle with the two methods that wait."""

    def __init__(self) -> None:
        self.watch, self.drained = Method(), Method()


@pytest.mark.parametrize("method", ["watch", "drained"])
def test_a_worker_that_is_watched_again_is_called_once(method: str) -> None:
    """Each call keeps one of the two threads of the worker's group until it returns, whether anybody waits for it or not."""

    async def run() -> int:
        actor = Actor()
        worker, called = RayWorker("reference-0", "log", actor), getattr(actor, method)
        first = asyncio.ensure_future(getattr(worker, method)())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.ensure_future(getattr(worker, method)())
        await asyncio.sleep(0)
        called.calls[0].answer.set_result(None)
        await asyncio.wait_for(second, HANG_S)
        return len(called.calls)

    assert asyncio.run(run()) == 1
