"""Workers as Ray actors on a running Ray cluster.

One placement group per job, one bundle per node it uses, pinned by the label ``rljob.dev/node-rank``, reserves *all* devices of
that node and its robots. Two jobs on one cluster therefore never share a device. Part of a node cannot be reserved: Ray counts
devices but the plan names them, so two jobs could both get "two of four" and both mean the first two.

Workers ask Ray for nothing besides the bundle. Which devices a worker uses is the plan's decision, several workers may use one
(shares would have to add up to a unit, and Ray takes no fraction of several), and the bundle holds them all anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api.naming import HARDWARE_RESOURCE, NODE_RANK_LABEL, ray_resource
from rljob_api.planning.environment import CUDA_VISIBLE_DEVICES
from rljob_api.planning.plan import Plan, PlannedNode
from rljob_runtime.cluster.collectives import first_line, is_broken_group
from rljob_runtime.cluster.host import WorkerHost, cuda_is_initialized, pod_visible_devices, settle_driver, visible_devices
from rljob_runtime.cluster.interpreter import CHECK_TIMEOUT_S, interpreter_problem
from rljob_runtime.cluster.nodes import SAY_EVERY_S, wait_for_nodes
from rljob_runtime.cluster.protocol import OnCall, Worker, WorkerSpec, gather_all
from rljob_runtime.errors import (
    BrokenGroupError,
    CallDeadlineError,
    ClusterError,
    DeadlineError,
    EngineDiedError,
    EngineLostError,
    NodeLostError,
    RuntimeFault,
    SetupError,
    StartupDeadlineError,
    WorkerFailedError,
    WorkerLostError,
)

NAMESPACE = "rljob"
PLACEMENT_WAIT_S = 1.0
NODES_LOOK_S = 1.0
"""How often :meth:`RayCluster.lost_node` looks; Ray itself needs up to half a minute to notice that a node is gone."""
WATCH_S = 366 * 24 * 3600.0
"""Longer than any run: watching a worker ends with the worker."""
CALLS, WATCH = "calls", "watch"
"""Ray's concurrency groups of a worker: threads of its own calls, and two that :meth:`RayWorker.watch` and ``drained`` keep."""
CPU_SHARE = 0.01
"""CPUs a bundle reserves: devices are what is accounted, cores are shared by all workers of a node."""


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Undo what Ray does to SIGINT and SIGTERM: it would exit the process before a checkpoint is written.

    It does nothing to them in another than the process's first thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class RayCluster:
    """Implements :class:`rljob_runtime.cluster.protocol.Cluster` on an existing Ray cluster."""

    def __init__(self, address: str, log_dir: Path) -> None:
        """Remember where to connect and where workers log; nothing is started."""
        self._address = address
        self._log_dir = log_dir
        self._group: PlacementGroup | None = None
        self._nodes: dict[int, PlannedNode] = {}
        """By rank, in the order of the bundles."""
        self._bundle_of_rank: dict[int, int] = {}
        self._actors: list[Any] = []
        self._connected = False
        self.on_call: OnCall | None = None

    async def start(self, plan: Plan, timeout_s: float, notify: Callable[[str], None]) -> None:
        """See the protocol."""
        deadline = time.monotonic() + timeout_s
        try:
            with own_signal_handlers():
                ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except (RuntimeError, ConnectionError, ValueError, RayError) as error:
            where = os.environ.get("RAY_ADDRESS", self._address)
            raise ClusterError(f"the Ray cluster at {where} cannot be reached: {error}") from error
        self._connected = True
        await wait_for_nodes(plan, deadline, notify)
        used = _used_nodes(plan)
        self._nodes = {node.rank: node for node in used}
        self._bundle_of_rank = {node.rank: index for index, node in enumerate(used)}
        self._group = placement_group(
            [_bundle(node) for node in used],
            strategy="PACK",
            bundle_label_selector=[{NODE_RANK_LABEL: str(node.rank)} for node in used],
        )
        await self._wait_for_devices(self._group, used, deadline, notify)

    async def _wait_for_devices(
        self, group: PlacementGroup, nodes: Sequence[PlannedNode], deadline: float, notify: Callable[[str], None]
    ) -> None:
        """Wait until the placement group is placed, in short waits, so that a stop is not held up by Ray's own."""
        say_at = time.monotonic() + SAY_EVERY_S
        while not await asyncio.to_thread(group.wait, PLACEMENT_WAIT_S):
            now = time.monotonic()
            wanted = ", ".join(f"node {n.rank} ({n.group}): {_bundle(n)}" for n in nodes)
            if now >= deadline:
                raise ClusterError(
                    "the devices were not free within the time that spec.startupDeadlineSeconds sets; "
                    f"wanted {wanted}; free now {ray.available_resources()}. Stop the job that holds them or raise the deadline"
                )
            if now >= say_at:
                say_at = now + SAY_EVERY_S
                notify(f"waiting for free devices, {deadline - now:.0f} s left: wanted {wanted}")

    async def start_workers(
        self,
        specs: Sequence[WorkerSpec],
        timeout_s: float,
        constructed: Callable[[Worker], None] = lambda worker: None,
        turn: asyncio.Event | None = None,
    ) -> list[Worker]:
        """See the protocol."""
        deadline = time.monotonic() + timeout_s
        await self._check_interpreters(specs, timeout_s)
        workers = [self._create(spec) for spec in specs]

        async def started(worker: RayWorker) -> None:
            if turn is not None and not turn.is_set():
                await worker.prepared(max(deadline - time.monotonic(), 1.0))
                await turn.wait()
            await worker.started(max(deadline - time.monotonic(), 1.0))
            constructed(worker)

        starting = [asyncio.ensure_future(started(worker)) for worker in workers]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()  # one may wait for a turn that does not come any more
            self.end_workers(workers)  # a process that came up in part would keep its memory
            raise
        return list(workers)

    async def _check_interpreters(self, specs: Sequence[WorkerSpec], timeout_s: float) -> None:
        """Ask every interpreter on every node that needs it, all at once.

        Raises:
            SetupError: with everything that is wrong with them.
            StartupDeadlineError: a node did not answer.
        """
        wanted = sorted({(s.node_rank, s.interpreter.field, s.interpreter.path) for s in specs if s.interpreter is not None})
        in_task_s = min(CHECK_TIMEOUT_S, timeout_s * 0.8)  # one that hangs is still named by its node
        asked = [
            ray.remote(interpreter_problem)
            .options(num_cpus=0, max_retries=0, scheduling_strategy=self._on(rank))
            .remote(path, in_task_s)
            .future()
            for rank, _, path in wanted
        ]
        try:
            found = await asyncio.wait_for(asyncio.gather(*map(asyncio.wrap_future, asked)), timeout_s)
        except TimeoutError as error:
            paths = ", ".join(sorted({path for _, _, path in wanted}))
            raise StartupDeadlineError(f"{paths} did not answer within {timeout_s:.0f} s (spec.startupDeadlineSeconds)") from error
        except RayError as error:
            raise ClusterError(f"Ray failed while it looked at the Python interpreters of the nodes: {error}") from error
        problems = [
            f"{field}: {path} on node {rank} (group {self._nodes[rank].group}) {problem}"
            for (rank, field, path), problem in zip(wanted, found, strict=True)
            if problem is not None
        ]
        if problems:
            remedy = "it must be a Python of the same version with rljob-runtime and the same ray; install it there, or remove the field"
            raise SetupError(f"{'; '.join(problems)}; {remedy}")

    @property
    def _reserved(self) -> PlacementGroup:
        if self._group is None:
            raise ClusterError("start_workers was called before start")
        return self._group

    def _on(self, node_rank: int) -> PlacementGroupSchedulingStrategy:
        """Pins to a planned node."""
        return PlacementGroupSchedulingStrategy(
            placement_group=self._reserved, placement_group_bundle_index=self._bundle_of_rank[node_rank]
        )

    def end_workers(self, workers: Sequence[Worker]) -> None:
        """See the protocol."""
        for worker in workers:
            if isinstance(worker, RayWorker):
                worker.end()

    async def lost_node(self) -> str:
        """See the protocol."""
        while True:
            found = await asyncio.to_thread(ray.nodes)
            there = {n["Labels"].get(NODE_RANK_LABEL) for n in found if n["Alive"]}
            gone = [node for rank, node in self._nodes.items() if str(rank) not in there]
            if gone:
                return f"node {gone[0].rank} of group {gone[0].group} is gone"
            await asyncio.sleep(NODES_LOOK_S)

    async def ended(self) -> str:
        """See the protocol: Ray's head ends with its control service, and with it the pod."""
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    async def start_standby(self, spec: WorkerSpec, timeout_s: float) -> RayWorker:
        """See the protocol."""
        worker = self._create(spec)
        try:
            await worker.stands_by(timeout_s)
        except BaseException:
            worker.end()
            raise
        return worker

    async def settle(self, workers: Sequence[Worker], timeout_s: float) -> None:
        """See the protocol."""
        calls = [worker.settle() for worker in workers if isinstance(worker, RayWorker)]
        settle_driver()
        await gather_all(calls, timeout_s)

    async def stop(self) -> None:
        """See the protocol."""
        if not self._connected:
            return
        self._connected = False
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)
        self._forget()
        await asyncio.to_thread(ray.shutdown)

    def _forget(self) -> None:
        """Nothing is left that Ray has to end."""
        self._actors.clear()
        self._group = None

    def runtime_env(self, spec: WorkerSpec) -> dict[str, Any] | None:
        """Ray's runtime environment of a worker; None where Ray's own Python runs it."""
        return {"py_executable": shlex.quote(spec.interpreter.path)} if spec.interpreter is not None else None

    def _create(self, spec: WorkerSpec) -> RayWorker:
        log_file = str(self._log_dir / f"{spec.name}.log")  # a standby process finds the log of what it becomes beside its own
        actor = (
            ray.remote(concurrency_groups={CALLS: spec.concurrency, WATCH: 2})(_HostActor)
            .options(
                name=f"{self._reserved.id.hex()[:8]}-{spec.name}-{len(self._actors)}",  # a lost worker's name is free only some time later
                num_cpus=0,
                runtime_env=self.runtime_env(spec),
                allow_out_of_order_execution=spec.concurrency > 1,  # what Ray does by itself as soon as max_concurrency is above 1
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=self._on(spec.node_rank),
            )
            .remote(spec, log_file)
        )
        self._actors.append(actor)
        return RayWorker(spec.name, log_file, actor, self.on_call)


class RayWorker:
    """Implements :class:`rljob_runtime.cluster.protocol.Worker` on an actor, and ``StandbyWorker`` on one that was only prepared."""

    def __init__(self, name: str, log_file: str, actor: Any, on_call: OnCall | None = None) -> None:
        """Wrap a created actor with the groups ``CALLS`` and ``WATCH``; it may still be starting."""
        self._on_call = on_call
        self._name = name
        self._log_file = log_file
        self._actor = actor
        self._watches: dict[str, Any] = {}

    def _watching(self, method: str) -> Any:
        """The one call of the process's life: each keeps one of the two threads of its group, also when nobody waits for it any more."""
        if method not in self._watches:
            self._watches[method] = self._begin(method, group=WATCH)
        return self._watches[method]

    def _begin(self, method: str, *args: Any, group: str = CALLS) -> Any:
        """Call a method of the host."""
        return getattr(self._actor, method).options(concurrency_group=group).remote(*args)

    @property
    def name(self) -> str:
        """Its unique name."""
        return self._name

    @property
    def log_file(self) -> str:
        """Path of its log on its own node."""
        return self._log_file

    async def started(self, timeout_s: float) -> None:
        """Wait until the worker is constructed.

        Raises:
            StartupDeadlineError: it was not within ``timeout_s``.
        """
        await self._startup("start", self._begin("build"), timeout_s)

    async def prepared(self, timeout_s: float) -> None:
        """Wait until the process has done all that it can without devices; it may be :meth:`started` then.

        Raises:
            StartupDeadlineError: it had not within ``timeout_s``.
        """
        await self._startup("prepare", self._begin("prepare"), timeout_s)

    async def stands_by(self, timeout_s: float) -> None:
        """Wait until the process is prepared, and waits to :meth:`become` a worker.

        Raises:
            SetupError: it has taken memory of a device, which it would keep for as long as it waits.
            StartupDeadlineError: it was not within ``timeout_s``.
        """
        await self._startup("prepare", self._begin("stand_by"), timeout_s)

    async def become(self, spec: WorkerSpec, timeout_s: float) -> RayWorker:
        """See ``StandbyWorker``."""
        worker = RayWorker(spec.name, str(Path(self._log_file).with_name(f"{spec.name}.log")), self._actor, self._on_call)
        await worker._startup("start", self._begin("become", spec, worker.log_file), timeout_s)
        return worker

    async def _startup(self, what: str, ref: Any, timeout_s: float) -> None:
        try:
            await RayPending(self, what, ref).result(timeout_s)
        except DeadlineError as error:
            raise StartupDeadlineError(f"{error} (spec.startupDeadlineSeconds)") from error

    def end(self) -> None:
        """End its process; may be called again."""
        ray.kill(self._actor, no_restart=True)

    def settle(self) -> RayPending:
        """Begin :meth:`WorkerHost.settle`."""
        return RayPending(self, "settle", self._begin("settle"))

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """See the protocol."""
        host, port = await RayPending(self, "address", self._begin("address")).result(timeout_s)
        return host, port

    async def watch(self) -> None:
        """See the protocol."""
        await RayPending(self, "watch", self._watching("watch")).result(WATCH_S)

    async def drained(self) -> None:
        """See the protocol."""
        await RayPending(self, "drained", self._watching("drained")).result(WATCH_S)

    def share(self, value: Any) -> Any:
        """See the protocol; an object in Ray's store, which lives as long as somebody holds the reference."""
        return ray.put(value)

    def start(self, method: str, *args: Any) -> RayPending:
        """See the protocol; a Pending argument travels as Ray's object reference."""
        sent = [a.ref if isinstance(a, RayPending) else a for a in args]
        return RayPending(self, method, self._begin("call", method, *sent), self._on_call)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See the protocol."""
        return await self.start(method, *args).result(timeout_s)


class RayPending:
    """Implements :class:`rljob_runtime.cluster.protocol.Pending` on an object reference."""

    __slots__ = ("_method", "_on_call", "_started_s", "_worker", "ref")

    def __init__(self, worker: RayWorker, method: str, ref: Any, on_call: OnCall | None = None) -> None:
        """Remember whose call it is, for messages, and when it began."""
        self._on_call = on_call
        self._started_s = time.monotonic()
        self._worker = worker
        self._method = method
        self.ref = ref

    async def result(self, timeout_s: float) -> Any:
        """See the protocol."""
        try:
            async with asyncio.timeout(timeout_s):  # not wait_for: before Python 3.12 it swallows a cancellation that meets the answer
                value = await asyncio.wrap_future(self.ref.future())
        except (TimeoutError, GetTimeoutError) as error:
            if isinstance(error, RuntimeFault):
                raise
            raise CallDeadlineError(self._worker.name, self._method, f"{timeout_s:g} s", self._worker.log_file) from error
        except RayTaskError as error:
            raise _unwrapped(error, self._worker, self._method) from error
        except RayActorError as error:
            raise _lost(error, self._worker) from error
        except RayError as error:
            raise ClusterError(f"Ray failed while {self._worker.name} ran {self._method}: {error}") from error
        if self._on_call is not None:
            self._on_call(self._worker.name, self._method, self._started_s, time.monotonic())
        return value


class _HostActor(WorkerHost):
    """The actor's class: shows the worker its own devices, by the pod's numbers, and no others."""

    def __init__(self, spec: WorkerSpec, log_file: str) -> None:
        self._pod_visible = pod_visible_devices(os.environ)  # before the variable is the worker's own
        super().__init__(spec.name, spec.factory, spec.kwargs, self._environment(spec), log_file)

    def become(self, spec: WorkerSpec, log_file: str) -> None:
        """Be another worker from now on, and construct it.

        Raises:
            SetupError: what this process did before lets it use no other devices.
        """
        seen, environment = os.environ[CUDA_VISIBLE_DEVICES], self._environment(spec)
        if environment[CUDA_VISIBLE_DEVICES] != seen and cuda_is_initialized():
            raise SetupError(f"while it waited for devices this process has initialized CUDA with devices {seen}, and sees no others")
        self._enter(spec.name, spec.factory, spec.kwargs, environment, log_file)
        self.build()

    def _environment(self, spec: WorkerSpec) -> dict[str, str]:
        return {**spec.env, CUDA_VISIBLE_DEVICES: visible_devices(spec.cuda_devices, self._pod_visible)}


def _used_nodes(plan: Plan) -> list[PlannedNode]:
    used = {p.node_rank for c in plan.components for p in c.processes}
    return [n for n in plan.nodes if n.rank in used]


def _bundle(node: PlannedNode) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": CPU_SHARE}
    if node.num_devices:
        bundle[ray_resource(node.device_resource)] = node.num_devices
    if node.hardware:
        bundle[HARDWARE_RESOURCE] = 1
    return bundle


def _unwrapped(error: RayTaskError, worker: RayWorker, method: str) -> RuntimeFault:
    """The runtime's own errors as they are, anything else with the worker's name."""
    cause = error.cause
    if isinstance(cause, EngineDiedError):
        return EngineLostError(worker.name, str(cause), worker.log_file)
    if isinstance(cause, RuntimeFault):
        return cause
    if isinstance(cause, RayActorError):
        return _lost(cause, worker)
    if is_broken_group(cause):
        return BrokenGroupError(worker.name, first_line(cause), worker.log_file)
    return WorkerFailedError(worker.name, method, f"{type(cause).__name__}: {cause}", worker.log_file)


def _lost(error: RayActorError, worker: RayWorker) -> RuntimeFault:
    """A process that ended, or one that raised before it was a worker."""
    if error.actor_init_failed:
        return WorkerFailedError(worker.name, "start", str(error).strip().splitlines()[-1][:300], worker.log_file)
    detail = _exit_detail(error)
    kind = NodeLostError if any(words in detail.lower() for words in ("node has died", "node died")) else WorkerLostError
    return kind(worker.name, detail, worker.log_file)


_TELLING = ("exit", "signal", "killed", "oom", "died because", "dead because", "node has died", "node died")
"""Words of the lines on the cause of an actor's death; the others are ids, and a first line that is always true."""


def _exit_detail(error: RayActorError) -> str:
    """The telling line of Ray's long text on a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if any(word in line.lower() for word in _TELLING)]
    return (telling[-1] if telling else lines[0] if lines else "no detail from Ray")[:300]
