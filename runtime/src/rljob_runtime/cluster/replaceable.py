"""A worker whose process may be replaced: whoever holds it calls the process that runs now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rljob_runtime.cluster.protocol import Pending, Worker, WorkerSpec
from rljob_runtime.cluster.standby import Standby, ended

SETTLE_TIMEOUT_S = 60.0
"""Deadline of one garbage collection."""


class StartsWorkers(Protocol):
    """The part of a cluster that this needs."""

    async def start_workers(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Worker]:
        """See :class:`~rljob_runtime.cluster.protocol.Cluster`."""

    def end_workers(self, workers: Sequence[Worker]) -> None:
        """See :class:`~rljob_runtime.cluster.protocol.Cluster`."""

    async def settle(self, workers: Sequence[Worker], timeout_s: float) -> None:
        """See :class:`~rljob_runtime.cluster.protocol.Cluster`."""


class ReplaceableWorker:
    """Implements :class:`rljob_runtime.cluster.protocol.Worker` over one process after another, all of the same spec."""

    def __init__(self, worker: Worker, spec: WorkerSpec, cluster: StartsWorkers, standby: Standby | None = None) -> None:
        """``worker`` runs already and was started from ``spec`` by ``cluster``; ``standby`` may have a process that takes its place."""
        self._current = worker
        self._spec = spec
        self._cluster = cluster
        self.standby = standby

    @property
    def name(self) -> str:
        """The same for every process."""
        return self._spec.name

    @property
    def log_file(self) -> str:
        """The same for every process: each appends to it."""
        return self._current.log_file

    @property
    def process(self) -> Worker:
        """The worker of the process that runs now."""
        return self._current

    def start(self, method: str, *args: Any) -> Pending:
        """See the protocol."""
        return self._current.start(method, *args)

    def share(self, value: Any) -> Any:
        """See the protocol."""
        return self._current.share(value)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See the protocol."""
        return await self._current.call(method, *args, timeout_s=timeout_s)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """See the protocol."""
        return await self._current.address(timeout_s)

    async def watch(self) -> None:
        """Wait for the end of the process that runs now."""
        await self._current.watch()

    async def drained(self) -> None:
        """See the protocol; of the process that runs now."""
        await self._current.drained()

    async def restart(self, timeout_s: float) -> None:
        """Start another process in the place of one that has ended: on the same node and devices, with the same settings.

        A standby process where there is one that lives, else one from scratch.

        Raises:
            SetupError, StartupDeadlineError, WorkerLostError, WorkerFailedError: as of ``start_workers``; it may be tried again.
        """
        deadline = time.monotonic() + timeout_s
        try:
            worker = None if self.standby is None else await self.standby.replace(self._spec, timeout_s)
            if worker is None:
                (worker,) = await self._cluster.start_workers([self._spec], max(deadline - time.monotonic(), 1.0))
        finally:
            if self.standby is not None:
                self.standby.refill()
        self._current = worker
        await self._cluster.settle([worker], SETTLE_TIMEOUT_S)

    async def end(self) -> None:
        """End what is left of the process; returns when it is gone, so that its memory is free when the next one measures what is."""
        self._cluster.end_workers([self._current])
        await ended(self._current)


def processes(workers: Iterable[Worker]) -> list[Worker]:
    """The workers of the processes that run now."""
    return [worker.process if isinstance(worker, ReplaceableWorker) else worker for worker in workers]
