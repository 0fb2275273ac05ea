"""What starts again within an attempt after a worker was lost, and what goes on.

::

    WorkerLostError ──> Restarts.take ──> end_others ──> launch(kept) ──> checkpoint loaded ──> loop
                     no: the attempt ends      engines, references and judges stay; trainer, critic, rewards, environments start again

Where components share devices all of them start again: nobody knows what a lost one left there. Either way nodes, Ray and the devices that
the job has reserved stay, which a further attempt would have to wait for. Engines and environments are replaced one by one instead
(:mod:`..loop.replacement`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rljob_runtime.cluster.protocol import Cluster, Worker, gather_all
from rljob_runtime.cluster.replaceable import processes
from rljob_runtime.cluster.standby import ended
from rljob_runtime.errors import NodeLostError, RuntimeFault, WorkerLostError
from rljob_runtime.job.launch import SHUTDOWN_TIMEOUT_S
from rljob_runtime.job.roles import ROLES
from rljob_runtime.loop.watching import run_beside
from rljob_runtime.loop.workers import Component, JobWorkers

CLEAR_TIMEOUT_S = 60.0
"""Until a worker that stays has ended what it did; one that has not is started again as well."""


class Restarts:
    """How often lost workers of an attempt may start again."""

    def __init__(self, limit: int, notify: Callable[[str], None]) -> None:
        """``limit``: spec.failurePolicy.maxWorkerRestarts; ``notify`` takes a line for users."""
        self._limit = limit
        self._used = 0
        self._notify = notify

    def take(self, error: WorkerLostError, workers: JobWorkers) -> bool:
        """Whether the loss is followed by a restart, which is counted and reported."""
        is_replaced_alone = error.worker not in [worker.name for worker in workers.indispensable]
        if isinstance(error, NodeLostError) or is_replaced_alone or not self._limit:
            return False
        if self._used >= self._limit:
            self._notify(f"{error}; all {self._limit} restarts of this attempt are used (spec.failurePolicy.maxWorkerRestarts)")
            return False
        self._used += 1
        self._notify(f"{error}; going on from the newest checkpoint, restart {self._used} of {self._limit}")
        return True


async def end_others(workers: JobWorkers, cluster: Cluster, error: WorkerLostError) -> dict[str, tuple[Worker, ...]]:
    """End the workers that have to start again after a loss; returns those that go on, by component."""
    staying = await asyncio.gather(*(_stays(component, workers, error) for component in workers.components))
    ending = [c for c, stays in zip(workers.components, staying, strict=True) if not stays]
    closing = [worker for component in ending if ROLES[component.role].closes for worker in component.workers]
    await asyncio.gather(*(worker.start("close").result(SHUTDOWN_TIMEOUT_S) for worker in closing), return_exceptions=True)
    leaving = processes(worker for component in ending for worker in component.workers)
    cluster.end_workers(leaving)
    await asyncio.gather(*map(ended, leaving))
    return {c.group.name: c.workers for c, stays in zip(workers.components, staying, strict=True) if stays}


async def start_again(start: Awaitable[JobWorkers], cluster: Cluster, error: WorkerLostError) -> JobWorkers:
    """What ``start`` brings up in place of what was lost, unless a node turns out to be gone with it.

    Raises:
        NodeLostError: there is no place to start again.
    """
    started: list[JobWorkers] = []

    async def starting() -> None:
        started.append(await start)

    async def nodes_stay() -> None:
        raise NodeLostError(error.worker, f"{error.exit_detail}; {await cluster.lost_node()}", error.log_file)

    await run_beside(starting(), [nodes_stay()])
    return started[0]


async def _stays(component: Component, workers: JobWorkers, error: WorkerLostError) -> bool:
    """Whether a component's workers go on; those that do have ended what they did for the loop that broke off."""
    description = ROLES[component.role]
    if not description.stays or workers.arbiter is not None or error.worker in [worker.name for worker in component.workers]:
        return False
    if description.forgets is None:
        return True
    try:
        await gather_all([worker.start(description.forgets, CLEAR_TIMEOUT_S) for worker in component.workers], 2 * CLEAR_TIMEOUT_S)
    except (RuntimeFault, TimeoutError):  # of a process that is gone, or hangs: it starts again with the others
        return False
    return True
