"""A placement brought up for a loop of one's own: nodes and devices as a job's, without its driver.

::

    nodeGroups, components ── planner ──> Placement of each component ── create_group(...).launch ──> Group
                                    └──> nodes: an embedded Ray cluster, or threads of this process
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from rljob_api import planner
from rljob_api.planning.plan import PlannedComponent
from rljob_api.quantities import rounded_down
from rljob_api.reading import manifest
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.cluster.protocol import Worker as RunningWorker
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.errors import SetupError
from rljob_runtime.job import worker_settings
from rljob_runtime.library import pickled
from rljob_runtime.library.event_loop import LoopThread
from rljob_runtime.library.manifests import Spec, read
from rljob_runtime.library.worker import WorkerPlace
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.clients import policies
from rljob_runtime.offload.plan import UNKNOWN_BYTES, Device
from rljob_runtime.offload.states import StateKind

DEFAULT_TIMEOUT_S = 600.0
HOLD_S = 24 * 3600.0
"""Longest time that a block keeps its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the workers of one component run."""

    cluster: Cluster
    component: PlannedComponent

    @property
    def name(self) -> str:
        """The component's."""
        return self.component.name

    @property
    def world_size(self) -> int:
        """Number of its workers."""
        return self.component.world_size

    @property
    def devices(self) -> tuple[int, ...]:
        """Global ranks of its devices."""
        return tuple(sorted(self.component.device_set()))

    @property
    def shares_devices_with(self) -> tuple[str, ...]:
        """Components that use some of its devices."""
        return self.component.shares_devices_with


class Cluster:
    """Nodes with devices, as ``nodeGroups`` and ``components`` describe them; a context manager."""

    def __init__(
        self, placement: Spec, *, in_process: bool = False, log_dir: str | Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Plan, start nothing.

        Args:
            placement: a job as for ``rljob.run``, of which nodes and components count; or a dict of these two alone.
            in_process: workers are objects and threads of this process, without Ray: for tests and notebooks on one device.
            log_dir: folder of the workers' logs; ``runs/<name>/logs`` when None.
            timeout_s: of the start, and the default of every wait and call.

        Raises:
            SpecInvalidError: with every problem of the placement.
            SetupError: the file cannot be read.
        """
        self._job = _job(placement)
        self._plan = planner.plan(self._spec)
        self._in_process = in_process
        self._log_dir = Path(log_dir) if log_dir is not None else Path("runs") / self._job.metadata.name / "logs"
        self.timeout_s = timeout_s
        self._loop: LoopThread | None = None
        self._threads: list[InProcessWorker] = []

    @property
    def placements(self) -> Mapping[str, Placement]:
        """The placement of every component, by its name."""
        return MappingProxyType({c.name: Placement(cluster=self, component=c) for c in self._plan.components})

    def start(self) -> Cluster:
        """Bring the nodes up and reserve their devices; returns itself. Without ``in_process`` in the process's main thread.

        Raises:
            ClusterError: the nodes did not come up in time.
        """
        if self._loop is not None:
            raise SetupError("the cluster runs already; close it before it is started again")
        self._loop = LoopThread("rljob-cluster")
        if not self._in_process:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            try:
                self._nodes.start_processes(self._plan)
                self._loop.run(self._nodes.start(self._plan, self.timeout_s, lambda text: None))
            except BaseException:
                self.close()
                raise
        return self

    def close(self) -> None:
        """End all workers and nodes; may be called twice."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None
        try:
            if "arbiter" in self.__dict__:
                loop.run(self.arbiter.aclose())
            for worker in self._threads:
                worker.stop()
            if not self._in_process:
                loop.run(self._nodes.stop())
        finally:
            self._threads.clear()
            for name in ("_nodes", "arbiter"):
                self.__dict__.pop(name, None)
            loop.close()

    def take_metrics(self) -> dict[str, float]:
        """What state moves cost since the last call: ``offload/bytes``, ``time/offload_s`` and others of docs/reference/metrics.md."""

        async def take() -> dict[str, float]:
            return self.arbiter.take_metrics()

        return self.loop.run(take())

    def __enter__(self) -> Cluster:
        """Start."""
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close."""
        self.close()

    # ---- for groups --------------------------------------------------------------------------------------------

    @property
    def loop(self) -> LoopThread:
        """Runs everything of this cluster.

        Raises:
            SetupError: it does not run.
        """
        if self._loop is None:
            raise SetupError("the cluster does not run; use it inside 'with rljob.Cluster(...) as cluster:', or call start()")
        return self._loop

    @cached_property
    def arbiter(self) -> DeviceArbiter:
        """Of all devices; made in the event loop."""
        memory = {group.name: group.device_memory for group in self._spec.node_groups}
        budgets = {
            Device(node.rank, index): rounded_down(text) if (text := memory[node.group]) is not None else UNKNOWN_BYTES
            for node in self._plan.nodes
            for index in range(node.num_devices)
        }
        return DeviceArbiter(budgets, hold_s=HOLD_S)

    def policies_of(self, component: PlannedComponent) -> dict[StateKind, OffloadPolicy]:
        """When each kind leaves; Auto is Always where the room on a device is not known."""
        wanted = policies(worker_settings.component_spec(self._spec, component.name).offload, Residency.SWITCHING)
        groups = {self._plan.nodes[p.node_rank].group for p in component.processes}
        if any(g.device_memory is None for g in self._spec.node_groups if g.name in groups):
            return {kind: OffloadPolicy.ALWAYS if policy is OffloadPolicy.AUTO else policy for kind, policy in wanted.items()}
        return wanted

    async def start_workers(
        self, component: PlannedComponent, name: str, made: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[RunningWorker]:
        """Start the workers of a group in rank order.

        Raises:
            WorkerFailedError: one could not be constructed.
            StartupDeadlineError, WorkerLostError: one did not come up.
        """
        places = [self._place(component, name, rank) for rank in range(component.world_size)]
        if self._in_process:
            objects = [await asyncio.to_thread(pickled.construct, pickled=made, args=args, kwargs=kwargs, place=p) for p in places]
            threads = [InProcessWorker(p.name, _Apart(target)) for p, target in zip(places, objects, strict=True)]
            self._threads += threads
            return list(threads)
        specs = [
            WorkerSpec(
                name=place.name,
                factory=pickled.CONSTRUCT,
                kwargs={"pickled": made, "args": args, "kwargs": dict(kwargs), "place": place},
                node_rank=process.node_rank,
                cuda_devices=() if place.device == "cpu" else process.local_devices,
                env={**worker_settings.worker_env(self._spec, self._plan, component, process)},
                interpreter=worker_settings.interpreter(self._spec, self._plan, component, process),
            )
            for place, process in zip(places, component.processes, strict=True)
        ]
        return await self._nodes.start_workers(specs, self.timeout_s)

    def _place(self, component: PlannedComponent, name: str, rank: int) -> WorkerPlace:
        process = component.processes[rank]
        on_cpu = not process.local_devices or worker_settings.device_type(self._spec, self._plan, process) is DeviceType.CPU
        return WorkerPlace(
            name=f"{name}-{rank}",
            rank=rank,
            world_size=component.world_size,
            node_rank=process.node_rank,
            devices=process.devices,
            device="cpu" if on_cpu else f"cuda:{process.local_devices[0]}" if self._in_process else "cuda:0",
        )

    @property
    def _spec(self) -> RLJobSpec:
        return self._job.spec

    @cached_property
    def _nodes(self) -> Any:
        from rljob_runtime.cluster.embedded import EmbeddedCluster

        labels = {group.name: dict(group.labels) for group in self._spec.node_groups}
        return EmbeddedCluster(self._log_dir.resolve(), worker_settings.node_cpus(self._spec), labels)


class _Apart:
    """An object whose answers are copies, as those of another process are: the memory of its state goes when it is offloaded."""

    def __init__(self, target: object) -> None:
        """Wrap a worker of this process."""
        self._target = target

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of it."""
        method = getattr(self._target, name)
        return lambda *args: copy.deepcopy(method(*args))


def _job(placement: Spec) -> RLJob:
    """The job of a placement; what it lacks besides nodes and components is filled in with what nobody reads."""
    if isinstance(placement, Mapping) and not {"kind", "spec"} & placement.keys():
        placement = {"metadata": {"name": "cluster"}, "spec": {"model": {"path": "not-loaded"}, **placement}}
        placement = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", **placement}
    given = read(placement)
    return manifest.to_job(manifest.read(given.text) if given.text is not None else manifest.Document(data=given.data))
