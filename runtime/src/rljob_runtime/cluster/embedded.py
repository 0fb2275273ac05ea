"""A Ray cluster on this machine with one Ray node per declared node, labeled like the real one.

The first node is also Ray's head, which has a pod of its own on Kubernetes: one node fewer to start, and what the driver puts into its
object store is already where the workers of that node read it. Nodes are started with Ray's own multi-node helper; SIGINT is blocked in
them by Ray, so Ctrl-C reaches the driver alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ray._private import services
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT
from ray.cluster_utils import Cluster as RayProcesses

from rljob_api.naming import HARDWARE_RESOURCE, NODE_GROUP_LABEL, NODE_RANK_LABEL, ray_resource
from rljob_api.planning.plan import Plan, PlannedNode
from rljob_runtime.cluster import idle_agent
from rljob_runtime.cluster.host import KEEP_VISIBLE_DEVICES, POD_VISIBLE_DEVICES
from rljob_runtime.cluster.ray_cluster import RayCluster, own_signal_handlers
from rljob_runtime.errors import ClusterError, SetupError

logger = logging.getLogger(__name__)
NODE_STORE_SHARE = 0.3
"""Share of the free shared memory that all nodes' object stores may map; only touched pages count."""
MIN_STORE_BYTES = 100 * 2**20
WORKER_NICENESS = "RAY_worker_niceness"
"""Added to the niceness of this command in Ray's workers; Ray's own 15 leaves them 3 % of a core that anything else wants, so that a run
beside other programs would be many times slower than the same training in one process."""
TASK_EVENTS = "RAY_task_events_report_interval_ms"
"""0 leaves out Ray's record of every call, which only its dashboard reads: the newest 100,000 calls, 50 to 100 MiB in Ray's GCS after some
hours, and a report of every worker each second."""
REPORTS_USAGE = "RAY_USAGE_STATS_ENABLED"
"""0 unless it is set: nothing is reported to Ray's makers."""
COLLECTS_METRICS = "RAY_enable_metrics_collection"
"""0 unless it is set: Ray's own metrics, which only its dashboard agents export. Those of the run are in its folder."""
AGENTS = {
    PROCESS_TYPE_DASHBOARD_AGENT: (idle_agent.__file__, idle_agent.DASHBOARD),
    PROCESS_TYPE_RUNTIME_ENV_AGENT: (idle_agent.__file__, idle_agent.RUNTIME_ENV),
}
"""Scripts that are run in the place of Ray's agents, and their first arguments."""
RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""After so long without the control service Ray ends a process that uses it, this one included, with exit code 1. The run itself notices
within a second, and has to end its workers and its report before."""
NEVER_S = str(366 * 24 * 3600)
CONTROL = "gcs_server"
"""What Ray calls the process of its control service."""
LOOK_S = 1.0
START_ATTEMPTS = 2
"""Ray waits a fixed 30 s for its processes; a second try finds their files in the page cache, which is what a slow machine lacks."""
QUIET = {"include_log_monitor": False}
"""Without the process that forwards workers' output to a driver's terminal: each worker writes its own log into the run folder."""
HEAD = {"include_dashboard": False, "no_monitor": True}
"""Without the autoscaler's monitor, because the nodes never change. Each would import Ray for nothing."""


class EmbeddedCluster(RayCluster):
    """Starts the nodes of the plan, then is a :class:`RayCluster` on them; :meth:`stop` ends them all."""

    def __init__(self, log_dir: Path, node_cpus: dict[str, int], node_labels: dict[str, dict[str, str]]) -> None:
        """``node_cpus`` and ``node_labels`` are by node group."""
        super().__init__("", log_dir)
        self._node_cpus = node_cpus
        self._node_labels = node_labels
        self._processes: RayProcesses | None = None

    async def start(self, plan: Plan, timeout_s: float, notify: Callable[[str], None]) -> None:
        """See the protocol."""
        if self._processes is None:
            self.start_processes(plan)
        await super().start(plan, timeout_s, notify)

    def start_processes(self, plan: Plan) -> str:
        """Start the nodes of the plan without connecting to them; returns the cluster's address.

        Raises:
            SetupError: this machine has fewer GPUs than the plan needs.
            ClusterError: a process did not start, or this is not the process's first thread, where Ray can install signal handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            raise ClusterError("the embedded Ray cluster can only be started in the process's main thread; call it there")
        os.environ[KEEP_VISIBLE_DEVICES] = "1"
        os.environ.setdefault(REPORTS_USAGE, "0")
        os.environ.setdefault(WORKER_NICENESS, "0")
        os.environ.setdefault(TASK_EVENTS, "0")
        os.environ.setdefault(COLLECTS_METRICS, "0")
        os.environ.setdefault(RECONNECT_S, NEVER_S)
        visible = _visible_to_nodes(plan)
        logging.getLogger("ray").setLevel(logging.ERROR)
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                with own_signal_handlers(), _without_api_server(), _idle_agents():
                    # in this thread: Ray installs signal handlers; its own deadlines bound each process
                    self._start_processes(plan, visible)
                break
            except Exception as error:  # that a node timed out comes as a bare Exception of Ray
                self._stop_processes()
                if attempt == START_ATTEMPTS:
                    raise ClusterError(f"the embedded Ray cluster did not start in {attempt} attempts: {error}") from error
                logger.warning("the embedded Ray cluster did not start and is started once more: %s", error)
        return self._address

    async def ended(self) -> str:
        """See the protocol. Ray would end this process a minute later (``RECONNECT_S``), with nothing to read but a line of its own."""
        while not self._control_has_ended():
            await asyncio.sleep(LOOK_S)
        log = self._processes.head_node.get_logs_dir_path() if self._processes is not None else "-"
        return f"Ray's control service ({CONTROL}) has ended, and nothing can be started or ended through it; its log: {log}/{CONTROL}.out"

    def _control_has_ended(self) -> bool:
        """Whether Ray's control service ended by itself."""
        if self._processes is None:
            return False
        return any(kind == CONTROL for kind, _ in self._processes.head_node.dead_processes())

    async def stop(self) -> None:
        """See the protocol. Without its control service Ray can end neither actors nor placement groups: all its processes are killed.

        Ray then takes 10 s to disconnect.
        """
        if self._control_has_ended():
            await asyncio.to_thread(self._kill_processes)
            self._forget()
        await super().stop()
        await asyncio.to_thread(self._stop_processes)

    def _kill_processes(self) -> None:
        """End every process of Ray's, and with it the workers, without asking the control service."""
        assert self._processes is not None
        for node in self._processes.list_all_nodes():
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)

    def _stop_processes(self) -> None:
        if self._processes is not None:
            processes, self._processes = self._processes, None
            processes.shutdown()

    def _start_processes(self, plan: Plan, visible: Sequence[str]) -> None:
        store_bytes = max(int(shutil.disk_usage("/dev/shm").free * NODE_STORE_SHARE) // len(plan.nodes), MIN_STORE_BYTES)
        self._processes = RayProcesses()
        for place, node in enumerate(plan.nodes):
            head = {} if place else HEAD
            os.environ[POD_VISIBLE_DEVICES] = visible[place]  # the node's processes inherit it
            self._processes.add_node(wait=False, object_store_memory=store_bytes, **self._node_arguments(node), **head, **QUIET)
        del os.environ[POD_VISIBLE_DEVICES]
        self._address = self._processes.address

    def _node_arguments(self, node: PlannedNode) -> dict[str, object]:
        resource = ray_resource(node.device_resource)
        arguments: dict[str, object] = {
            "num_cpus": self._node_cpus[node.group],
            "num_gpus": node.num_devices if resource == "GPU" else 0,
            "labels": {**self._node_labels[node.group], NODE_GROUP_LABEL: node.group, NODE_RANK_LABEL: str(node.rank)},
        }
        custom = {HARDWARE_RESOURCE: 1} if node.hardware else {}
        if resource != "GPU" and node.num_devices:
            custom[resource] = node.num_devices
        if custom:
            arguments["resources"] = custom
        return arguments


@contextlib.contextmanager
def _without_api_server() -> Iterator[None]:
    """Ray's head starts no server of its API inside the block.

    That server, without the dashboard, does nothing but report usage: `ray status` and the workers ask the GCS, metrics and logs are those
    of the run folder. Ray starts it all the same, no argument prevents it, and waits for it, 1.1 s, before it starts a node.
    """
    if os.environ[REPORTS_USAGE] != "0":
        yield
        return
    start_api_server = Node.start_api_server
    Node.start_api_server = _no_api_server
    try:
        yield
    finally:
        Node.start_api_server = start_api_server


@contextlib.contextmanager
def _idle_agents() -> Iterator[None]:
    """Nodes that are started inside the block have agents that import nothing of Ray before they get a request.

    Ray starts two on every node and waits for them, and no argument prevents it: 1.4 s of processor time and 200 MB for each node, of which
    a run uses the second one alone, and only where ``pythonInterpreter`` is set. The function that is replaced is private and builds the
    beginning of their commands; a Ray without it fails the start by its name, one that does not call it starts its own agents.
    """
    agents = dict(AGENTS)
    if os.environ[COLLECTS_METRICS] != "0":
        del agents[PROCESS_TYPE_DASHBOARD_AGENT]
    interpreter = services._build_python_executable_command_memory_profileable

    def chosen(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component in agents:  # Ray appends the path of its agent and the arguments
            return [sys.executable, "-I", "-S", *agents[component]]
        command: list[str] = interpreter(component, *arguments, **options)
        return command

    services._build_python_executable_command_memory_profileable = chosen
    try:
        yield
    finally:
        services._build_python_executable_command_memory_profileable = interpreter


def _no_api_server(node: Any, **_: object) -> None:
    """In place of ``Node.start_api_server``: the address of a dashboard is all that the node wants of it."""
    node._webui_url = ""


def _visible_to_nodes(plan: Plan) -> list[str]:
    """By node, the GPUs of this machine that it has to itself, as CUDA_VISIBLE_DEVICES; empty for a node on which no process has one.

    Raises:
        SetupError: there are fewer than the plan needs.
    """
    used = {process.node_rank for component in plan.components for process in component.processes if process.devices}
    wanted = [node.num_devices if node.rank in used and ray_resource(node.device_resource) == "GPU" else 0 for node in plan.nodes]
    here = _devices_here() if any(wanted) else []
    if sum(wanted) > len(here):
        by_group: Counter[str] = Counter()
        for node, number in zip(plan.nodes, wanted, strict=True):
            by_group[node.group] += number
        groups = ", ".join(f"{number} in {group}" for group, number in by_group.items() if number)
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise SetupError(
            f"spec.nodeGroups need {sum(wanted)} GPU{'s' if sum(wanted) > 1 else ''} ({groups}), and this process sees {len(here)} "
            f"(CUDA_VISIBLE_DEVICES {'is not set' if named is None else f'is {named!r}'}); lower devicesPerNode, write "
            "deviceResource: cpu, or apply the job to a cluster"
        )
    return [",".join(here[end - number : end]) for number, end in zip(wanted, itertools.accumulate(wanted), strict=True)]


def _devices_here() -> list[str]:
    """The GPUs that this process may use, by what CUDA_VISIBLE_DEVICES calls them."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [entry.strip() for entry in named.split(",") if entry.strip()]
    import torch  # only here: Ray and the driver do without it until later

    return [str(index) for index in range(torch.cuda.device_count())]
