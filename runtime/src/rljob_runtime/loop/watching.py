"""What goes on beside the loop and ends it: background tasks that fail, workers whose processes end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.loop.workers import JobWorkers


async def run_beside(main: Coroutine[Any, Any, None], background: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` to its end; a background task that ends first can only have failed, and its error ends everything.

    A dead worker also makes calls fail elsewhere; the error that names the dead process is preferred.
    """
    main_task = asyncio.ensure_future(main)
    others = [asyncio.ensure_future(b) for b in background]
    try:
        await asyncio.wait({main_task, *others}, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            if task.done():
                task.result()
        await main_task
    finally:
        for task in (main_task, *others):
            task.cancel()
        await asyncio.gather(main_task, *others, return_exceptions=True)


async def watch_workers(workers: JobWorkers, on_engine_lost: Callable[[int, WorkerLostError], None]) -> None:
    """Fails with WorkerLostError as soon as a worker's process ends that the run cannot do without.

    Args:
        workers: of the job.
        on_engine_lost: called with the index of an engine that is gone; raises if no other can take over.
    """

    async def watch_engine(index: int) -> None:
        try:
            await workers.engines[index].watch()
        except WorkerLostError as error:
            on_engine_lost(index, error)

    tasks = [asyncio.ensure_future(w.watch()) for w in workers.indispensable]
    tasks += [asyncio.ensure_future(watch_engine(index)) for index in range(len(workers.engines))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
