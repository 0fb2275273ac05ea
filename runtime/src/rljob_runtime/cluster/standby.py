"""A process that waits to take the place of a lost worker, and is filled again after it was used.

::

    run: start_standby ──> waits ──┬─ taken by `replace` ──> worker ──> `refill` ──> start_standby ...
                                   └─ its process ended ──────────────────────────> start_standby, MAX_LOSSES times

``replace`` takes one that is still being prepared, too: it began earlier than any other process could. Where there is none, or it fails
while it becomes the worker, the caller starts a process from scratch. Used by :mod:`.replaceable`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rljob_runtime.cluster.protocol import StandbyWorker, Worker, WorkerSpec
from rljob_runtime.errors import RuntimeFault, WorkerLostError

MAX_LOSSES = 3
"""After so many standby processes in a row that did not live to be used there is something wrong on that node: no more are started."""
END_TIMEOUT_S = 30.0
"""How long the end of a process may take that was killed; where it cannot be confirmed, as on a node that is gone, nothing waits longer."""


class StartsStandby(Protocol):
    """The part of a cluster that this needs."""

    async def start_standby(self, spec: WorkerSpec, timeout_s: float) -> StandbyWorker:
        """See :class:`~rljob_runtime.cluster.protocol.Cluster`."""


class Standby:
    """One process at a time, for workers of the same component on one node."""

    def __init__(self, spec: WorkerSpec, cluster: StartsStandby, *, timeout_s: float, notify: Callable[[str], None]) -> None:
        """Nothing is started before :meth:`run`.

        Args:
            spec: of the process while it waits; its name is that of its log.
            cluster: starts it.
            timeout_s: for all that is done before it waits.
            notify: takes a line for users.
        """
        self._spec = spec
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._notify = notify
        self._next: asyncio.Task[StandbyWorker] | None = None
        """Being prepared, or done and waiting; None: none to take."""
        self._taken = asyncio.Event()
        self._wanted = asyncio.Event()
        """Set when the worker that took the last one is up, or given up."""

    async def run(self) -> None:
        """Keep one process ready until cancelled."""
        losses = 0
        while losses < MAX_LOSSES:
            self._taken.clear()
            starting = self._next = asyncio.ensure_future(self._cluster.start_standby(self._spec, self._timeout_s))
            try:
                lost = await self._until_taken_or_lost(starting)
            finally:
                if not self._taken.is_set():  # who takes it ends it, too
                    self._next = None
                    _discard(starting)
            if lost is None:
                losses = 0
                await self._wanted.wait()
            else:
                losses += 1
                then = "another one takes its place" if losses < MAX_LOSSES else f"none takes its place after {losses} in a row"
                self._notify(f"{lost}; it was to take the place of a lost engine, and {then}")

    async def replace(self, spec: WorkerSpec, timeout_s: float) -> Worker | None:
        """Make the waiting process the worker of ``spec``; None: there is none, or it failed, and nothing of it is left.

        Call :meth:`refill` when the worker is up, or given up.
        """
        taking, self._next = self._next, None
        if taking is None:
            return None
        self._wanted.clear()
        self._taken.set()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        process: StandbyWorker | None = None
        try:
            async with asyncio.timeout_at(deadline):
                process = await taking
            return await process.become(spec, max(deadline - loop.time(), 1.0))
        except (RuntimeFault, TimeoutError) as fault:
            self._notify(f"{self._spec.name} did not become {spec.name}, which is started from scratch instead: {fault}")
            if process is not None:
                process.end()
                await ended(process)
            return None
        except BaseException:
            if process is not None:
                process.end()
            raise

    def refill(self) -> None:
        """The worker that took the last process no longer needs the node's cores for its start."""
        self._wanted.set()

    async def _until_taken_or_lost(self, starting: asyncio.Task[StandbyWorker]) -> RuntimeFault | None:
        """Wait until the process is taken (None), or lost while it was prepared or waited (how)."""
        taken = asyncio.ensure_future(self._taken.wait())
        watching: asyncio.Task[None] | None = None
        try:
            await asyncio.wait([starting, taken], return_when=asyncio.FIRST_COMPLETED)
            if self._taken.is_set():
                return None
            watching = asyncio.ensure_future(starting.result().watch())
            await asyncio.wait([watching, taken], return_when=asyncio.FIRST_COMPLETED)
            if not self._taken.is_set():
                watching.result()
        except RuntimeFault as fault:
            return fault
        finally:
            for task in (taken, watching):
                if task is not None and not task.cancel() and not task.cancelled():
                    task.exception()  # seen: it does not matter any more
        return None


def _discard(starting: asyncio.Task[StandbyWorker]) -> None:
    """End a process that nobody took; one that is still being prepared ends with its task."""
    if not starting.cancel() and not starting.cancelled() and starting.exception() is None:
        starting.result().end()


async def ended(process: Worker | StandbyWorker) -> None:
    """Wait for the end of a process that was asked to end, so that its memory is free when the next one measures what is."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await process.watch()
    except (TimeoutError, WorkerLostError):
        return
