"""What the driver needs of a cluster: start named workers on planned nodes, call them, stop them.

Workers are plain classes (engines, trainer ranks, reward pools); a cluster hosts each in a process of its own.
``Worker.start`` returns at once with a :class:`Pending`; passing a Pending as an argument of another worker's call hands
the value over without a way through the driver.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rljob_api.planning.plan import Plan

INLINE_BYTES = 90 * 1024
"""Values below it travel in the call itself, others are worth :meth:`Worker.share` in a thread. Ray does so below 100 KiB, and a call
without an object to fetch takes 1.5 ms instead of 3.2."""

OnCall = Callable[[str, str, float, float], None]
"""Called after every call that was answered and awaited: worker, method, monotonic seconds of its start and of its answer here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python that a worker runs on."""

    path: str
    """Absolute path on the worker's node."""
    field: str
    """Field of the spec that names it, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker process to start."""

    name: str
    """Unique, ``<component>-<rank>``; also the name of its log file."""
    factory: str
    """``module:Class``, imported and called inside the worker's process."""
    kwargs: Mapping[str, Any]
    node_rank: int
    cuda_devices: tuple[int, ...] = ()
    """Indexes on the node of the only CUDA devices it sees; none for a worker without devices, and where CPU cores compute."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Set before anything heavy is imported."""
    interpreter: Interpreter | None = None
    """None is the Python that Ray runs on."""
    concurrency: int = 1
    """Calls that may run at the same time, each in its own thread and in no certain order; with 1 they run in the order of their starts."""


class Pending(Protocol):
    """A call under way."""

    async def result(self, timeout_s: float) -> Any:
        """Wait for the value.

        Raises:
            DeadlineError: after ``timeout_s``.
            WorkerLostError: when the worker's process is gone.
            WorkerFailedError: when the call raised something foreign; errors of the runtime's own tree come as they are.
        """


class Worker(Protocol):
    """A running worker."""

    @property
    def name(self) -> str:
        """Its unique name."""

    @property
    def log_file(self) -> str:
        """Path of its log on its own node."""

    def start(self, method: str, *args: Any) -> Pending:
        """Begin a call; arguments that are Pending are replaced by their values.

        A worker of concurrency 1 runs its calls in the order of their starts, also where an early one waits for an argument: trainer ranks
        need it, whose scores belong to the weights before the next update, and whose collectives have to meet.
        """

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """``start`` and ``result`` in one."""

    def share(self, value: Any) -> Any:
        """What stands for ``value`` as an argument of calls of this and of other workers of its cluster: sent once, whoever gets it.

        May take long and be called in any thread.
        """

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """The worker's network address and a free port there."""

    async def watch(self) -> None:
        """Wait for as long as the worker lives.

        Raises:
            WorkerLostError: at its end.
        """

    async def drained(self) -> None:
        """Wait until the worker's pod is asked to end.

        Raises:
            WorkerLostError: the worker ended.
        """


class StandbyWorker(Protocol):
    """A process without devices that is ready to become a worker."""

    async def become(self, spec: WorkerSpec, timeout_s: float) -> Worker:
        """Make it the worker of ``spec``, of the same node, factory and interpreter; returns once that has been constructed.

        Raises:
            StartupDeadlineError, WorkerLostError, WorkerFailedError: the process is of no use any more.
        """

    async def watch(self) -> None:
        """Wait for as long as the process lives.

        Raises:
            WorkerLostError: at its end.
        """

    def end(self) -> None:
        """End the process."""


class Cluster(Protocol):
    """Nodes that match a plan."""

    on_call: OnCall | None
    """Set before workers are started."""

    async def start(self, plan: Plan, timeout_s: float, notify: Callable[[str], None]) -> None:
        """Connect, wait until exactly the planned nodes are there, reserve their devices; ``notify`` gets what is missing.

        Raises:
            ClusterError: what is missing, by node, group and device count.
        """

    async def start_workers(
        self,
        specs: Sequence[WorkerSpec],
        timeout_s: float,
        constructed: Callable[[Worker], None] = lambda worker: None,
        turn: asyncio.Event | None = None,
    ) -> list[Worker]:
        """Start all workers, in parallel; returns them in the order of ``specs`` once each has been constructed.

        Args:
            specs: what to start.
            timeout_s: for all of it.
            constructed: gets each worker as soon as it is constructed.
            turn: until it is set no worker is constructed, and their processes do only what needs no device, imports above all. Who passes
                one sets it or cancels this call in time: the wait for it has no deadline. None: the turn has come.

        Raises:
            SetupError: an interpreter is missing or cannot run workers; names it, its node and its field.
            StartupDeadlineError, WorkerLostError, WorkerFailedError.
        """

    async def lost_node(self) -> str:
        """Wait for as long as all nodes with workers are there; then which one is gone, in words."""

    async def ended(self) -> str:
        """Wait for as long as the cluster's control service lives; then what became of it, in words.

        Forever where whoever notices its end also ends this process, as in a pod.
        """

    async def start_standby(self, spec: WorkerSpec, timeout_s: float) -> StandbyWorker:
        """Start a process that does all it can for the worker of ``spec`` without its devices, and returns when it has done that.

        Raises:
            StartupDeadlineError, WorkerLostError, WorkerFailedError.
        """

    def end_workers(self, workers: Sequence[Worker]) -> None:
        """End some workers of :meth:`start_workers`, whose work is done."""

    async def settle(self, workers: Sequence[Worker], timeout_s: float) -> None:
        """Workers are set up: the garbage collector of each looks from now on at what comes after.

        Raises:
            DeadlineError, WorkerLostError: a worker did not answer.
        """

    async def stop(self) -> None:
        """End all workers and whatever :meth:`start` brought up; never what it only connected to. Safe to call twice."""


async def gather_all(pendings: Sequence[Pending], timeout_s: float) -> list[Any]:
    """Values of all calls in order; the first failure is raised at once and the others are left to end on their own.

    When one rank of a collective dies the others hang in it until their own time-out: the first failure is the cause.
    """
    tasks = [asyncio.ensure_future(p.result(timeout_s)) for p in pendings]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
