"""Process groups of the components that compute with torch, formed and given their model while other workers still start.

An engine takes longer to construct than a rank of a trainer, and a large model long to load in both. Where a component shares devices with
others, its ranks wait until all workers are constructed, for some of these measure what is free on the devices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rljob_api.planning.plan import PlannedComponent
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.errors import DeadlineError, StartupDeadlineError


class ProcessGroups:
    """Those of components that start together; a context manager, at whose end nothing of it goes on."""

    def __init__(
        self, components: Mapping[str, PlannedComponent], names: Mapping[str, Sequence[str]], left_s: Callable[[], float], timeout_s: float
    ) -> None:
        """Nothing is formed before :meth:`add`.

        Args:
            components: that have a process group, by name.
            names: of their workers by rank, by component.
            left_s: seconds that are left for forming and loading.
            timeout_s: of every later collective.
        """
        self._components = components
        self._names = names
        self._component_of = {worker: component for component in components for worker in names[component]}
        self._left_s = left_s
        self._timeout_s = timeout_s
        self._constructed: dict[str, Worker] = {}
        self._forming: dict[str, asyncio.Task[None]] = {}
        self._failed = asyncio.Event()
        """Set when a group could not be formed."""

    async def __aenter__(self) -> Self:
        """Return it."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give up what is under way."""
        for task in self._forming.values():
            task.cancel()
        await asyncio.gather(*self._forming.values(), return_exceptions=True)

    def add(self, worker: Worker) -> None:
        """A worker was constructed; one of another component changes nothing."""
        component = self._component_of.get(worker.name)
        if component is None:
            return
        self._constructed[worker.name] = worker
        if not self._components[component].shares_devices_with and self._constructed.keys() >= set(self._names[component]):
            self._form(component)

    async def beside(self, starting: Coroutine[Any, Any, list[Worker]]) -> list[Worker]:
        """What ``starting`` returns, which calls :meth:`add`; cancelled as soon as a group fails that is formed meanwhile.

        Raises:
            Exception: of ``starting``, or of :meth:`formed`.
        """
        task, failed = asyncio.ensure_future(starting), asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait([task, failed], return_when=asyncio.FIRST_COMPLETED)
            for forming in self._forming.values():
                if forming.done():
                    forming.result()
            return await task
        finally:
            task.cancel()
            failed.cancel()
            await asyncio.gather(task, failed, return_exceptions=True)

    async def formed(self) -> None:
        """Wait for all groups; call it when all workers are constructed.

        Raises:
            StartupDeadlineError: one did not form within the time that was left.
            ModelError, WorkerLostError, WorkerFailedError: a rank cannot load its model, or ended.
        """
        for component in self._components.keys() - self._forming.keys():
            self._form(component)
        await asyncio.gather(*self._forming.values())

    def _form(self, component: str) -> None:
        group = [self._constructed[name] for name in self._names[component]]
        forming = self._forming[component] = asyncio.ensure_future(self._set_up(group))
        forming.add_done_callback(lambda over: None if over.cancelled() or over.exception() is None else self._failed.set())

    async def _set_up(self, group: Sequence[Worker]) -> None:
        """Form one group and load its model."""
        try:
            host, port = await group[0].address(self._left_s())
            await gather_all([w.start("setup", host, port, self._timeout_s) for w in group], self._left_s())
        except DeadlineError as error:
            raise StartupDeadlineError(f"{error} (spec.startupDeadlineSeconds)") from error
