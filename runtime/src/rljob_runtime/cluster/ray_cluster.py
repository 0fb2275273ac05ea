"""Workers as Ray actors on a running Ray cluster.

One placement group per job reserves the planned devices: one bundle per planned node, pinned by the label
``rljob.dev/node-rank``. Two jobs on one cluster therefore never share a device by accident.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rljob_api.plan import Plan, PlannedNode
from rljob_runtime.cluster.host import WorkerHost, visible_devices
from rljob_runtime.cluster.protocol import Worker, WorkerSpec
from rljob_runtime.errors import ClusterError, DeadlineError, RuntimeFault, WorkerFailedError, WorkerLostError

RANK_LABEL = "rljob.dev/node-rank"
GROUP_LABEL = "ray.io/node-group"
NAMESPACE = "rljob"
WATCH_S = 366 * 24 * 3600.0
"""Longer than any run: watching a worker ends with the worker."""
CPU_SHARE = 0.01
"""CPUs a bundle reserves: devices are what is accounted, cores are shared by all workers of a node."""


@contextlib.contextmanager
def own_signal_handlers() -> Iterator[None]:
    """Undo what Ray does to SIGINT and SIGTERM: it would exit the process before a checkpoint is written."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ray_resource(device_resource: str) -> str:
    """Ray's name for a Kubernetes device resource."""
    if device_resource == "cpu":
        return "rljob_cpu_device"
    return "GPU" if device_resource.endswith("/gpu") else device_resource.replace("/", "_").replace(".", "_")


class RayCluster:
    """Implements :class:`rljob_runtime.cluster.protocol.Cluster` on an existing Ray cluster."""

    def __init__(self, address: str, log_dir: Path) -> None:
        """Remember where to connect and where workers log; nothing is started."""
        self._address = address
        self._log_dir = log_dir
        self._group: PlacementGroup | None = None
        self._bundle_of_rank: dict[int, int] = {}
        self._actors: list[Any] = []
        self._connected = False

    async def start(self, plan: Plan, timeout_s: float) -> None:
        """See the protocol."""
        deadline = time.monotonic() + timeout_s
        with own_signal_handlers():
            ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        self._connected = True
        await wait_for_nodes(plan, deadline)
        used = _used_nodes(plan)
        self._bundle_of_rank = {node.rank: index for index, node in enumerate(used)}
        self._group = placement_group(
            [_bundle(node) for node in used],
            strategy="PACK",
            bundle_label_selector=[{RANK_LABEL: str(node.rank)} for node in used],
        )
        ready = await asyncio.to_thread(self._group.wait, max(deadline - time.monotonic(), 1.0))
        if not ready:
            wanted = ", ".join(f"node {n.rank} ({n.group}): {_bundle(n)}" for n in used)
            raise ClusterError(
                f"the devices were not free within {timeout_s:.0f} s; wanted {wanted}; free now {ray.available_resources()}. "
                "Stop the job that holds them or raise spec.startupDeadlineSeconds"
            )

    async def start_workers(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Worker]:
        """See the protocol."""
        workers = [self._create(spec) for spec in specs]
        await asyncio.gather(*(w.started(timeout_s) for w in workers))
        return list(workers)

    async def stop(self) -> None:
        """See the protocol."""
        if not self._connected:
            return
        self._connected = False
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors.clear()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        await asyncio.to_thread(ray.shutdown)

    def _create(self, spec: WorkerSpec) -> RayWorker:
        log_file = str(self._log_dir / f"{spec.name}.log")
        if self._group is None:
            raise ClusterError("start_workers was called before start")
        resources = {ray_resource(spec.device_resource): len(spec.local_devices)} if spec.local_devices else {}
        num_gpus = resources.pop("GPU", 0)
        actor = (
            ray.remote(_HostActor)
            .options(
                name=f"{self._group.id.hex()[:8]}-{spec.name}",
                num_cpus=0,
                num_gpus=num_gpus,
                resources=resources,
                max_concurrency=spec.concurrency + 1,  # one thread is taken by watch
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=self._bundle_of_rank[spec.node_rank]
                ),
            )
            .remote(spec, log_file)
        )
        self._actors.append(actor)
        return RayWorker(spec.name, log_file, actor)


class RayWorker:
    """Implements :class:`rljob_runtime.cluster.protocol.Worker` on an actor."""

    def __init__(self, name: str, log_file: str, actor: Any) -> None:
        """Wrap a created actor; it may still be starting."""
        self._name = name
        self._log_file = log_file
        self._actor = actor

    @property
    def name(self) -> str:
        """Its unique name."""
        return self._name

    @property
    def log_file(self) -> str:
        """Path of its log on its own node."""
        return self._log_file

    async def started(self, timeout_s: float) -> None:
        """Wait until the worker is constructed."""
        await self.address(timeout_s)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        """See the protocol."""
        host, port = await RayPending(self, "start", self._actor.address.remote()).result(timeout_s)
        return host, port

    async def watch(self) -> None:
        """See the protocol."""
        await RayPending(self, "watch", self._actor.watch.remote()).result(WATCH_S)

    def start(self, method: str, *args: Any) -> RayPending:
        """See the protocol; a Pending argument travels as Ray's object reference."""
        sent = [a.ref if isinstance(a, RayPending) else a for a in args]
        return RayPending(self, method, self._actor.call.remote(method, *sent))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See the protocol."""
        return await self.start(method, *args).result(timeout_s)


class RayPending:
    """Implements :class:`rljob_runtime.cluster.protocol.Pending` on an object reference."""

    __slots__ = ("_method", "_worker", "ref")

    def __init__(self, worker: RayWorker, method: str, ref: Any) -> None:
        """Remember whose call it is, for messages."""
        self._worker = worker
        self._method = method
        self.ref = ref

    async def result(self, timeout_s: float) -> Any:
        """See the protocol."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.ref.future()), timeout_s)
        except (TimeoutError, GetTimeoutError) as error:
            if isinstance(error, RuntimeFault):
                raise
            raise DeadlineError(
                f"worker {self._worker.name} did not finish {self._method} within {timeout_s:.0f} s; its log: {self._worker.log_file}"
            ) from error
        except RayTaskError as error:
            raise _unwrapped(error, self._worker, self._method) from error
        except RayActorError as error:
            raise WorkerLostError(self._worker.name, _exit_detail(error), self._worker.log_file) from error
        except RayError as error:
            raise ClusterError(f"Ray failed while {self._worker.name} ran {self._method}: {error}") from error


class _HostActor(WorkerHost):
    """The actor's class: adds the translation of planned devices to the pod's own."""

    def __init__(self, spec: WorkerSpec, log_file: str) -> None:
        import os

        env = dict(spec.env)
        if spec.device_resource != "cpu" and spec.local_devices:
            env["CUDA_VISIBLE_DEVICES"] = visible_devices(spec.local_devices, os.environ.get("RLJOB_POD_VISIBLE_DEVICES"))
        super().__init__(spec.name, spec.factory, spec.kwargs, env, log_file)


async def wait_for_nodes(plan: Plan, deadline: float) -> None:
    """Wait until every planned node is alive with its label, group and device count.

    Raises:
        ClusterError: at the deadline, with everything that is still missing.
    """
    while missing := missing_nodes(plan, ray.nodes()):
        if time.monotonic() >= deadline:
            raise ClusterError("the Ray cluster does not match the plan: " + "; ".join(missing))
        await asyncio.sleep(0.05)


def missing_nodes(plan: Plan, ray_nodes: Sequence[dict[str, Any]]) -> list[str]:
    """What ``ray.nodes()`` lacks of the plan, one sentence each; empty when all is there."""
    by_rank = {n["Labels"].get(RANK_LABEL): n for n in ray_nodes if n["Alive"]}
    problems = []
    for node in plan.nodes:
        found = by_rank.get(str(node.rank))
        if found is None:
            problems.append(f"node {node.rank} (group {node.group}, index {node.index}) has not joined")
            continue
        group = found["Labels"].get(GROUP_LABEL)
        if group != node.group:
            problems.append(f"node {node.rank} is labelled {GROUP_LABEL}={group}, planned {node.group}")
        have = found["Resources"].get(ray_resource(node.device_resource), 0)
        if have < node.num_devices:
            problems.append(f"node {node.rank} (group {node.group}) offers {have:g} of {node.num_devices} {node.device_resource}")
    return problems


def _used_nodes(plan: Plan) -> list[PlannedNode]:
    used = {p.node_rank for c in plan.components for p in c.processes}
    return [n for n in plan.nodes if n.rank in used]


def _bundle(node: PlannedNode) -> dict[str, float]:
    bundle: dict[str, float] = {"CPU": CPU_SHARE}
    if node.num_devices:
        bundle[ray_resource(node.device_resource)] = node.num_devices
    return bundle


def _unwrapped(error: RayTaskError, worker: RayWorker, method: str) -> RuntimeFault:
    """The runtime's own errors as they are, anything else with the worker's name."""
    cause = error.cause
    if isinstance(cause, RuntimeFault):
        return cause
    if isinstance(cause, RayActorError):
        return WorkerLostError(worker.name, _exit_detail(cause), worker.log_file)
    return WorkerFailedError(worker.name, method, f"{type(cause).__name__}: {cause}", worker.log_file)


def _exit_detail(error: RayActorError) -> str:
    """The telling line of Ray's long text on a dead actor."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if any(w in line.lower() for w in ("exit", "signal", "killed", "oom", "died because"))]
    return (telling or lines or ["no detail from Ray"])[-1][:300]
