"""Of several errors at the same time the one that names the lost process is reported."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rljob_runtime.errors import BrokenGroupError, DataError, RuntimeFault, WorkerLostError
from rljob_runtime.loop import watching
from rljob_runtime.loop.watching import run_beside
from tests.support.virtual_time import run_virtual

BROKEN = BrokenGroupError("train-0", "Connection closed by peer", "train-0.log")
LOST = WorkerLostError("train-1", "signal 9", "train-1.log")


async def fails(error: RuntimeFault, after_s: float) -> None:
    await asyncio.sleep(after_s)
    raise error


async def seconds_and_error(main: Coroutine[Any, Any, None], background: Coroutine[Any, Any, None]) -> tuple[float, RuntimeFault]:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    with pytest.raises(RuntimeFault) as found:
        await run_beside(main, [background])
    return loop.time() - began_s, found.value


def test_a_broken_group_waits_for_the_rank_that_ended_to_be_named() -> None:
    took_s, error = run_virtual(seconds_and_error(fails(BROKEN, 1.0), fails(LOST, 1.5)))
    assert (took_s, error) == (1.5, LOST)


def test_where_no_rank_ended_the_group_itself_is_named() -> None:
    took_s, error = run_virtual(seconds_and_error(fails(BROKEN, 1.0), fails(LOST, 1000.0)))
    assert (took_s, error) == (1.0 + watching.NAMED_WITHIN_S, BROKEN)


def test_other_errors_wait_for_nothing() -> None:
    wrong = DataError("no rows")
    assert run_virtual(seconds_and_error(fails(wrong, 1.0), fails(LOST, 1.5))) == (1.0, wrong)
