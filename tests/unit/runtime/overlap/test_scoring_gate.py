"""Which calls of reward workers pass when."""

from __future__ import annotations

import asyncio

import pytest

from rljob_runtime.overlap.scoring_gate import ScoringGate
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult
from tests.support.pace import HANG_S

BATCH: RewardBatch = object()  # type: ignore[assignment]


class Slow:
    """Scores only when a test says so."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = asyncio.Event()

    async def score(self, batch: RewardBatch) -> list[RewardResult]:
        self.begun += 1
        await self.go.wait()
        return []


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_what_waits_passes_and_what_comes_later_waits_for_the_next_time() -> None:
    async def run() -> None:
        slow = Slow()
        gate = ScoringGate(slow.score)
        calls = [asyncio.create_task(gate.score(BATCH)) for _ in range(2)]
        await settle()
        assert (gate.waiting, slow.begun) == (2, 0)
        passing = asyncio.create_task(gate.pass_waiting())
        await settle()
        calls.append(asyncio.create_task(gate.score(BATCH)))
        await settle()
        assert (gate.waiting, slow.begun, passing.done()) == (1, 2, False)
        slow.go.set()
        async with asyncio.timeout(HANG_S):
            await passing
        assert [call.done() for call in calls] == [True, True, False]
        async with asyncio.timeout(HANG_S):
            await gate.pass_waiting()
        assert gate.waiting == 0
        await asyncio.gather(*calls)

    asyncio.run(run())


def test_an_open_gate_lets_everything_pass_and_closes_when_that_has_ended() -> None:
    async def run() -> None:
        slow = Slow()
        gate = ScoringGate(slow.score)
        first = asyncio.create_task(gate.score(BATCH))
        await settle()
        gate.open()
        second = asyncio.create_task(gate.score(BATCH))
        await settle()
        assert (gate.waiting, slow.begun) == (0, 2)
        closing = asyncio.create_task(gate.close())
        await settle()
        late = asyncio.create_task(gate.score(BATCH))
        await settle()
        assert (gate.waiting, slow.begun, closing.done()) == (1, 2, False)
        slow.go.set()
        async with asyncio.timeout(HANG_S):
            await closing
            await asyncio.gather(first, second)
        assert not late.done()
        late.cancel()
        await settle()
        assert gate.waiting == 0

    asyncio.run(run())


def test_a_call_that_fails_ends_the_wait_for_it() -> None:
    async def fail(batch: RewardBatch) -> list[RewardResult]:
        raise ValueError("no score")

    async def run() -> None:
        gate = ScoringGate(fail)
        call = asyncio.create_task(gate.score(BATCH))
        await settle()
        async with asyncio.timeout(HANG_S):
            await gate.pass_waiting()
        with pytest.raises(ValueError, match="no score"):
            await call

    asyncio.run(run())
