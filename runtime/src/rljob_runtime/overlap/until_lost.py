"""Waiting for a worker to be lost, by whichever of the tasks that talk to it finds out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from rljob_runtime.errors import WorkerLostError


async def until_lost(*parts: Coroutine[None, None, None]) -> WorkerLostError:
    """Run all of them, each of which ends with an error only; returns how the worker was lost.

    Not a task group: one that fails at the moment at which it is cancelled forgets the cancellation before Python 3.13.

    Raises:
        BaseException: the first error of a part that is no loss of the worker.
    """
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    losses = [error for error in ended if isinstance(error, WorkerLostError)]
    for error in ended:
        if isinstance(error, BaseException) and not isinstance(error, WorkerLostError | asyncio.CancelledError):
            raise error
    return losses[0]
