"""Requests are spread over reward workers: each to one, the least loaded first, answers in order, a deadline that counts the queue."""

import asyncio
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from rljob_runtime.cluster.protocol import INLINE_BYTES
from rljob_runtime.errors import WorkerLostError
from rljob_runtime.overlap.reward_router import RewardRouter
from rljob_runtime.packed import RewardBatch, reward_batch
from rljob_runtime.records import RewardResult
from tests.support.records import ids, make_prompt

LIMIT_S = 7.0


def requests(count: int, prefix: str = "s") -> RewardBatch:
    """Responses of 0, 1, 2, ... tokens."""
    names = [f"{prefix}{i}" for i in range(count)]
    tokens = [ids(*range(i * 100, i * 100 + i)) for i in range(count)]
    return reward_batch(names, [make_prompt(0)] * count, ["stop"] * count, tokens)


@dataclass
class Call:
    """One call under way; ends when the test lets its worker answer."""

    part: RewardBatch
    answered: asyncio.Event
    lost: bool = False
    deadline_s: float = 0.0

    async def result(self, timeout_s: float) -> Any:
        self.deadline_s = timeout_s
        await self.answered.wait()
        if self.lost:
            raise WorkerLostError("reward-0", "signal 9", "reward.log")
        return [RewardResult(sample_id=name, score=1.0) for name in self.part.sample_ids]


@dataclass
class RewardWorker:
    """Answers when asked to."""

    name: str = "reward-0"
    log_file: str = "reward.log"
    calls: list[Call] = field(default_factory=list)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    shared: list[RewardBatch] = field(default_factory=list)

    def share(self, value: RewardBatch) -> RewardBatch:
        assert threading.current_thread() is not threading.main_thread(), "a large value is written in the event loop"
        self.shared.append(value)
        return value

    def start(self, method: str, *args: Any) -> Call:
        self.calls.append(Call(*args, answered=self.answered))
        return self.calls[-1]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 7, 8])
async def test_each_request_goes_to_one_worker_in_even_shares_and_answers_are_in_order(count: int, workers: int) -> None:
    pool = [RewardWorker() for _ in range(workers)]
    for worker in pool:
        worker.answered.set()
    asked = requests(count)
    results = await RewardRouter(pool, LIMIT_S).score(asked)
    assert [result.sample_id for result in results] == list(asked.sample_ids)
    shares = [call.part for worker in pool for call in worker.calls]
    assert [name for share in shares for name in share.sample_ids] == list(asked.sample_ids)
    assert [t.tolist() for share in shares for t in share.responses()] == [t.tolist() for t in asked.responses()]
    assert all(1 <= len(share.sample_ids) == len(share.prompts) == len(share.finish_reasons) <= -(-count // workers) for share in shares)
    assert max((len(worker.calls) for worker in pool), default=0) <= 1


async def test_the_least_loaded_worker_comes_first() -> None:
    busy, idle = RewardWorker(), RewardWorker()
    router = RewardRouter([busy, idle], LIMIT_S)
    async with asyncio.TaskGroup() as tasks:
        for prefix, count in (("a", 1), ("b", 1), ("c", 1)):
            tasks.create_task(router.score(requests(count, prefix)))
            await asyncio.sleep(0)
        assert [[call.part.sample_ids[0] for call in worker.calls] for worker in (busy, idle)] == [["a0", "c0"], ["b0"]]
        idle.answered.set()
        await asyncio.sleep(0)
        tasks.create_task(router.score(requests(1, "d")))
        await asyncio.sleep(0)
        assert [call.part.sample_ids[0] for call in idle.calls] == ["b0", "d0"]
        busy.answered.set()


async def test_a_workers_failure_is_raised_and_frees_its_share_of_the_load() -> None:
    lost, other = RewardWorker(), RewardWorker()
    router = RewardRouter([lost, other], LIMIT_S)
    failing = asyncio.ensure_future(router.score(requests(1)))
    await asyncio.sleep(0)
    lost.calls[0].lost = True
    lost.answered.set()
    with pytest.raises(WorkerLostError):
        await failing
    again = asyncio.ensure_future(router.score(requests(1)))
    await asyncio.sleep(0)
    assert (len(lost.calls), len(other.calls)) == (2, 0)
    assert [result.sample_id for result in await again] == ["s0"]


async def test_the_deadline_covers_what_the_worker_has_to_score_before() -> None:
    worker = RewardWorker()
    router = RewardRouter([worker], LIMIT_S)
    async with asyncio.TaskGroup() as tasks:
        for count in (3, 2):
            tasks.create_task(router.score(requests(count)))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        first, second = (call.deadline_s for call in worker.calls)
        assert first > 3 * LIMIT_S
        assert second - first == 2 * LIMIT_S
        worker.answered.set()


@pytest.mark.parametrize("large", [False, True])
async def test_large_shares_are_written_beside_the_event_loop(large: bool) -> None:
    pool = [RewardWorker(), RewardWorker()]
    for worker in pool:
        worker.answered.set()
    tokens = ids(*range(INLINE_BYTES // 4 if large else 4))
    asked = reward_batch(["a", "b"], [make_prompt(0)] * 2, ["stop"] * 2, [tokens, tokens])
    results = await RewardRouter(pool, LIMIT_S).score(asked)
    assert [result.sample_id for result in results] == ["a", "b"]
    assert [len(worker.shared) for worker in pool] == [large, large]
