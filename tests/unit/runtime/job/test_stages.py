"""Stages of a start begin together and get their turns one after another."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from rljob_runtime.job.stages import run_in_turn
from tests.support.virtual_time import run_virtual


def test_each_stage_gets_its_turn_when_the_one_before_has_ended() -> None:
    log: list[str] = []

    async def stage(name: str, ahead_s: float, own_s: float, turn: asyncio.Event) -> None:
        now = asyncio.get_running_loop().time
        log.append(f"{name} begins {now():.0f}")
        await asyncio.sleep(ahead_s)
        await turn.wait()
        log.append(f"{name} has its turn {now():.0f}")
        await asyncio.sleep(own_s)

    run_virtual(run_in_turn([partial(stage, "policies", 0, 3), partial(stage, "judge", 5, 2), partial(stage, "engines", 1, 4)]))
    begins = [f"{name} begins 0" for name in ("policies", "judge", "engines")]
    assert log == [*begins, "policies has its turn 0", "judge has its turn 5", "engines has its turn 7"]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_first_failure_comes_as_it_is_with_its_cause_when_all_others_have_ended(failing: int) -> None:
    ended: list[int] = []

    async def stage(index: int, turn: asyncio.Event) -> None:
        try:
            if index == failing:
                raise ValueError("no room") from KeyError("device")
            await asyncio.sleep(9)
            await turn.wait()
        finally:
            await asyncio.sleep(0)
            ended.append(index)

    async def run() -> None:
        with pytest.raises(ValueError, match="no room") as found:
            await run_in_turn([partial(stage, index) for index in range(3)])
        assert isinstance(found.value.__cause__, KeyError)
        assert sorted(ended) == [0, 1, 2]
        assert asyncio.get_running_loop().time() == 0

    run_virtual(run())


def test_a_start_of_nothing_ends_at_once() -> None:
    async def run() -> float:
        await run_in_turn([])
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == 0
