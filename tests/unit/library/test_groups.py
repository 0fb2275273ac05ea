"""Groups for loops without ``async``: who waits for whom, what moves, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rljob
from rljob_runtime.errors import SetupError
from rljob_runtime.library import groups
from rljob_runtime.library.event_loop import LoopThread
from rljob_runtime.library.groups import Group

SHARED = {
    "nodeGroups": [{"name": "n", "nodes": 1, "devicesPerNode": 1, "deviceResource": "cpu"}],
    "components": [
        {"name": "a", "role": "Trainer", "placement": {"ranks": "0"}},
        {"name": "b", "role": "Reference", "placement": {"ranks": "0"}},
    ],
}


class Counter(rljob.Worker):
    def __init__(self, start: int) -> None:
        self.value = torch.full((1000,), float(start))
        self.register(rljob.StateKind.PARAMS, "value", self.value)

    def add(self, number: int) -> float:
        self.value += number
        return self.value[0].item()

    def where(self) -> tuple[str, int, int]:
        return self.place.name, self.place.rank, self.place.world_size


class Plain:
    def double(self, number: int) -> int:
        return 2 * number


@pytest.fixture
def cluster() -> Iterator[rljob.Cluster]:
    with rljob.Cluster(SHARED, in_process=True, timeout_s=60) as running:
        yield running


def test_two_groups_on_one_device_take_turns_and_blocks_keep_others_out(cluster: rljob.Cluster) -> None:
    a = rljob.create_group(Counter, 1).launch(cluster.placements["a"])
    b = rljob.create_group(Counter, start=10).launch(cluster.placements["b"], name="other")
    assert (a.add(1), b.add(1), a.add(1)) == ([2.0], [11.0], [3.0])
    order: list[str] = []
    inside, begun = threading.Event(), threading.Event()

    def competing() -> None:
        inside.wait(60)
        begun.set()
        b.add(1)
        order.append("b")

    thread = threading.Thread(target=competing)
    thread.start()
    with a.resident():
        inside.set()
        begun.wait(60)
        with a.resident([rljob.StateKind.PARAMS]):
            a.add(1)
        order.append(f"a {a.add(1)}")
    thread.join(60)
    assert order == ["a [5.0]", "b"]
    assert b.where() == [("other-0", 0, 1)]
    assert cluster.take_metrics()["offload/bytes"] > 0


def test_a_block_that_raises_gives_the_device_back(cluster: rljob.Cluster) -> None:
    a, b = (rljob.create_group(Counter, 0).launch(cluster.placements[name]) for name in "ab")
    with pytest.raises(KeyError, match="mine"), a.resident():
        raise KeyError("mine")
    assert b.add(1) == [1.0]


def test_a_plain_class_and_a_call_without_waiting(cluster: rljob.Cluster) -> None:
    group = rljob.create_group(Plain).launch(cluster.placements["a"])
    assert group.start("double", 4).result(60) == [8]
    assert group.call("double", each=[(5,)]) == [10]
    with pytest.raises(AttributeError, match=r"Plain has no method doubel; did you mean double\?"):
        group.doubel(1)


def test_answers_do_not_share_memory_with_state_that_leaves(cluster: rljob.Cluster) -> None:
    class Weights(Counter):
        def weights(self) -> torch.Tensor:
            return self.value

    a = rljob.create_group(Weights, 7).launch(cluster.placements["a"])
    (weights,) = a.weights()
    a.offload_states()
    assert weights.tolist() == [7.0] * 1000


def test_problems_are_reported_where_they_are_made(cluster: rljob.Cluster) -> None:
    bad: dict[str, Any] = {**SHARED, "components": [{"name": "a", "role": "Trainer", "placement": {"ranks": "0-9"}}]}
    with pytest.raises(rljob.SpecInvalidError, match="ranks"):
        rljob.Cluster(bad)
    with pytest.raises(rljob.SpecInvalidError, match="nodeGroup"):
        rljob.Cluster({**SHARED, "nodeGroup": []})
    closed = rljob.Cluster(SHARED, in_process=True)
    with pytest.raises(SetupError, match="does not run"):
        rljob.create_group(Plain).launch(closed.placements["a"])
    with pytest.raises(SetupError, match="runs already"):
        cluster.start()
    with pytest.raises(rljob.RuntimeFault, match=r"^no/such/file\.yaml: cannot be read \(No such file or directory\); give the path"):
        rljob.run("no/such/file.yaml")
    with pytest.raises(SetupError, match="overwrite and resume"):
        rljob.run(SHARED, overwrite=True, resume=True)


def test_the_end_of_a_loop_ends_what_others_wait_for() -> None:
    loop = LoopThread("loop")
    future = loop.start(asyncio.sleep(1000))
    loop.close()
    with pytest.raises(CancelledError):
        future.result(timeout=20)


class InterruptedWait(Future[None]):
    """Ctrl-C comes while somebody waits for it."""

    def result(self, timeout: float | None = None) -> None:
        raise KeyboardInterrupt


def test_an_interruption_of_the_wait_for_devices_keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, states, allowed = LoopThread("loop"), list[str](), asyncio.Event()

    class Slow:
        workers = ()

        @asynccontextmanager
        async def resident(self, kinds: object, is_offload_states: object = None) -> AsyncIterator[None]:
            await allowed.wait()
            states.append("leased")
            yield

    cluster: Any = SimpleNamespace(loop=loop, timeout_s=5)
    group: Any = Group(cluster, "g", object, Slow())  # type: ignore[arg-type]
    monkeypatch.setattr(groups, "Future", InterruptedWait)
    with pytest.raises(KeyboardInterrupt), group.resident():
        pass

    async def allow() -> None:
        allowed.set()
        await asyncio.sleep(0)

    loop.run(allow())
    loop.close()
    assert states == []
