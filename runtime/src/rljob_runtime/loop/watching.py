"""What goes on beside the loop and ends it: background tasks that fail, workers whose processes end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import BrokenGroupError

ResultT = TypeVar("ResultT")

NAMED_WITHIN_S = 5.0
"""How long a broken process group waits for the rank that ended to become known: Ray tells of a process within a second or two."""


async def run_beside(main: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` to its end; a background task that ends first can only have failed, and its error ends everything.

    A dead worker also makes calls fail elsewhere, collectives of other ranks first of all; the error that names the dead process is
    preferred.
    """
    main_task = asyncio.ensure_future(main)
    others = [asyncio.ensure_future(b) for b in background]
    try:
        await asyncio.wait({main_task, *others}, return_when=asyncio.FIRST_COMPLETED)
        if others and main_task.done() and not main_task.cancelled() and isinstance(main_task.exception(), BrokenGroupError):
            await asyncio.wait(others, timeout=NAMED_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            if task.done():
                task.result()
        await main_task
    finally:
        for task in (main_task, *others):
            task.cancel()
        await asyncio.gather(main_task, *others, return_exceptions=True)


@asynccontextmanager
async def beside(coroutine: Coroutine[Any, Any, ResultT], lost: Callable[[Exception], None]) -> AsyncIterator[asyncio.Task[ResultT]]:
    """A task beside the block, which awaits it; where the block fails it ends with it.

    ``lost`` gets the error of a task that had failed by then, when the block raises another one.
    """
    task = asyncio.ensure_future(coroutine)
    try:
        yield task
    except BaseException as error:
        task.cancel()
        (found,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(found, Exception) and found is not error:
            lost(found)
        raise


async def watch_workers(workers: Sequence[Worker], on_drain: Callable[[str], None]) -> None:
    """Fails with WorkerLostError as soon as a process of these workers ends, and never returns; engines are the supervisor's.

    ``on_drain`` is called with the name of each worker whose pod is asked to end.
    """
    watches = [worker.watch() for worker in workers]
    tasks = [asyncio.ensure_future(wait) for wait in (*watches, *(_notice(worker, on_drain) for worker in workers))]
    try:
        await asyncio.gather(asyncio.Event().wait(), *tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _notice(worker: Worker, on_drain: Callable[[str], None]) -> None:
    await worker.drained()
    on_drain(worker.name)
