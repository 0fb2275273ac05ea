"""Worker groups for programs without ``async``: calls find their state on the devices, whoever used them before.

::

    create_group(Class, ...) ─> GroupFactory ── launch(placement) ──> Group ── call, resident, offload_states ──> WorkerGroup
"""

from __future__ import annotations

import asyncio
import difflib
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any

from rljob_api.planning.plan import PlannedComponent
from rljob_runtime.cluster.protocol import Worker as RunningWorker
from rljob_runtime.cluster.protocol import gather_all
from rljob_runtime.errors import SetupError
from rljob_runtime.library import pickled
from rljob_runtime.library.cluster import Cluster, Placement
from rljob_runtime.offload.clients import ClientProcess, DeviceClient, local_devices
from rljob_runtime.offload.states import StateKind, SwitchReport
from rljob_runtime.offload.worker_group import WorkerGroup, lease_owner

_block: ContextVar[str | None] = ContextVar("block", default=None)
"""Owner of the leases of the enclosing ``resident`` block in this thread."""
_blocks = count(1)


class GroupFactory:
    """What a group is made of; made by :func:`create_group`."""

    def __init__(self, worker: type[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start nothing."""
        self._worker = worker
        self._args = args
        self._kwargs = kwargs

    def launch(self, placement: Placement, *, name: str | None = None) -> Group:
        """Start a worker at every place of the component, and return once all are constructed.

        Where components share devices, the state of a :class:`~.worker.Worker` leaves them at once, so that the next finds room.

        Args:
            placement: of a running cluster.
            name: of the group, in messages and logs; the component's when None.

        Raises:
            SetupError: the cluster does not run, or the class cannot be sent to another process.
            WorkerFailedError: a worker's constructor raised.
            StartupDeadlineError, WorkerLostError: a worker did not come up.
            NoRoomError: what is there already leaves no room on a device.
        """
        cluster, title = placement.cluster, name or placement.name
        try:
            made = pickled.dumps(self._worker)
        except (TypeError, ValueError, pickle.PicklingError) as error:
            raise SetupError(
                f"{self._worker.__qualname__} cannot be sent to another process: {error}; import inside its methods"
            ) from error
        return Group(cluster, title, self._worker, cluster.loop.run(self._start(placement, title, made)))

    async def _start(self, placement: Placement, name: str, made: bytes) -> WorkerGroup:
        cluster, component = placement.cluster, placement.component
        workers = await cluster.start_workers(component, name, made, self._args, self._kwargs)
        if not component.shares_devices_with:
            return WorkerGroup(name, workers, timeout_s=cluster.timeout_s)
        sizes: list[dict[StateKind, int]] = [{} for _ in workers]
        if hasattr(self._worker, "offload") and hasattr(self._worker, "load"):
            reports = await gather_all([w.start("offload", list(StateKind)) for w in workers], cluster.timeout_s)
            sizes = [_sizes(report) for report in reports]
        processes = [_process(worker, size, component, rank) for rank, (worker, size) in enumerate(zip(workers, sizes, strict=True))]
        client = DeviceClient(name=name, processes=tuple(processes), policies=cluster.policies_of(component))
        cluster.arbiter.add(client, resident=())
        return WorkerGroup(name, workers, timeout_s=cluster.timeout_s, arbiter=cluster.arbiter)


def _sizes(report: SwitchReport) -> dict[StateKind, int]:
    return {kind: size for kind, size in report.freed_bytes.items() if size}


def _process(worker: RunningWorker, size_bytes: dict[StateKind, int], component: PlannedComponent, rank: int) -> ClientProcess:
    return ClientProcess(worker=worker, devices=local_devices(component.processes[rank]), size_bytes=size_bytes)


def create_group(worker: type[Any], *args: Any, **kwargs: Any) -> GroupFactory:
    """A group of workers of one class, each constructed with the same arguments in a process of its own by ``launch``.

    Args:
        worker: any class; of one derived from ``rljob.Worker`` the registered state leaves shared devices. One of a notebook or script is
            sent along.
        args: of its constructor.
        kwargs: of its constructor.
    """
    return GroupFactory(worker, args, kwargs)


class Group:
    """Running workers of one class. Public methods of the class can be called on the group: ``group.score(x)`` is ``call("score", x)``."""

    def __init__(self, cluster: Cluster, name: str, worker: type[Any], group: WorkerGroup) -> None:
        """Made by ``launch``."""
        self.name = name
        self._cluster = cluster
        self._worker = worker
        self._group = group

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._group.workers)

    def call(
        self,
        method: str,
        *args: Any,
        each: Sequence[Sequence[Any]] | None = None,
        is_offload_states: bool | None = None,
        include: Iterable[StateKind] | None = None,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of all workers at the same time, with their state on the devices; values come by rank.

        Args:
            method: of the class.
            args: the same for all.
            each: instead of ``args``, the arguments of each worker, by rank.
            is_offload_states: afterwards, None: what is Always leaves, the rest when others need the room; True: all leaves that may;
                False: all stays until others need the room.
            include: kinds that the call needs; nothing else is loaded. None: all.
            timeout_s: of the wait for devices and state, and again of the call; None: the cluster's.

        Raises:
            ValueError: ``each`` is not one per worker, or comes with ``args``.
            DeadlineError: devices, state or an answer did not come in time.
            OffloadError, NoRoomError, LeaseLostError, WorkerLostError: state could not be moved, or a worker is gone.
            WorkerFailedError: the method raised; carries its text.
        """
        more = {"each": each, "is_offload_states": is_offload_states, "include": include, "timeout_s": timeout_s}
        return self._cluster.loop.run(_owned(self._group.call, method, *args, **more))

    def start(self, method: str, *args: Any, each: Sequence[Sequence[Any]] | None = None) -> Future[list[Any]]:
        """The same without waiting: calls of groups on other devices run meanwhile. Errors come with the future's result."""
        return self._cluster.loop.start(_owned(self._group.call, method, *args, each=each))

    @contextmanager
    def resident(self, kinds: Iterable[StateKind] | None = None, *, is_offload_states: bool | None = None) -> Iterator[None]:
        """Keep state on the devices during several calls of this thread, which no other group's call interrupts; blocks may be nested.

        Args:
            kinds: what the calls need; None: all.
            is_offload_states: after the block, as for :meth:`call`.

        Raises:
            DeadlineError, OffloadError, NoRoomError, LeaseLostError, WorkerLostError: as of :meth:`call`.
        """
        loop, outer = self._cluster.loop, _block.get()
        owner = outer or f"{threading.current_thread().name}, block {next(_blocks)}"
        entered: Future[None] = Future()
        leave = asyncio.Event()

        async def hold() -> None:
            with lease_owner(owner):
                async with self._group.resident(kinds, is_offload_states=is_offload_states):
                    entered.set_result(None)
                    await leave.wait()

        held = loop.start(hold())

        def over(ended: Future[None]) -> None:
            if not entered.done():
                cause = None if ended.cancelled() else ended.exception()
                entered.set_exception(cause or RuntimeError("never entered"))

        held.add_done_callback(over)
        try:
            entered.result()
        except BaseException:  # an interruption too: the lease would be kept for as long as the cluster lives
            held.cancel()
            raise
        token = _block.set(owner)
        try:
            yield
        finally:
            _block.reset(token)
            loop.run(_set(leave))
            held.result()

    def offload_states(self, kinds: Iterable[StateKind] | None = None) -> None:
        """Take kinds off the devices, whatever the policy but Never; None: all.

        Raises:
            OffloadError, DeadlineError, WorkerLostError: a move failed.
        """
        self._cluster.loop.run(_owned(self._group.offload_states, kinds))

    def reload_states(self, kinds: Iterable[StateKind] | None = None) -> None:
        """Bring kinds onto the devices; None: all. They stay until others need the room, or a later call ends.

        Raises:
            NoRoomError, OffloadError, DeadlineError, WorkerLostError: a move failed.
        """
        self._cluster.loop.run(_owned(self._group.reload_states, kinds))

    def __getattr__(self, name: str) -> Callable[..., list[Any]]:
        """A public method of the class."""
        known = [n for n in dir(self._worker) if not n.startswith("_") and callable(getattr(self._worker, n))]
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise AttributeError(f"{self._worker.__name__} has no method {name}; {hint}")

        def called(*args: Any, **options: Any) -> list[Any]:
            return self.call(name, *args, **options)

        return called


async def _set(event: asyncio.Event) -> None:
    event.set()


def _owned(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call as a part of the caller's ``resident`` block."""
    owner = _block.get()

    async def run() -> Any:
        if owner is None:
            return await method(*args, **kwargs)
        with lease_owner(owner):
            return await method(*args, **kwargs)

    return run()
