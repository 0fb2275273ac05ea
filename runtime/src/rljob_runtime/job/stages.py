"""Stages of a start: each begins ahead of its turn with what needs no devices, and goes on with it once the stage before has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

Stage = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Gets the event of its turn."""


async def run_in_turn(stages: Sequence[Stage]) -> None:
    """Run all stages at the same time; the turn of each comes when the one before has ended, that of the first at once.

    Raises:
        Exception: that of the first stage to fail, whichever it is; the others have been cancelled, and have ended by then.
    """
    turns = [asyncio.Event() for _ in stages]

    async def run(index: int, stage: Stage) -> None:
        await stage(turns[index])
        for following in turns[index + 1 : index + 2]:
            following.set()

    for first in turns[:1]:
        first.set()
    try:
        async with asyncio.TaskGroup() as group:
            for index, stage in enumerate(stages):
                group.create_task(run(index, stage))
    except ExceptionGroup as failures:
        failure = failures.exceptions[0]
    else:
        return
    raise failure
