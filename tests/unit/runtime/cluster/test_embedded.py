"""The embedded cluster's start, over Ray's process helper replaced by one that fails when asked to."""

import asyncio
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from ray import _raylet
from ray._private import services
from ray._private.ray_constants import PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT

from rljob_api.naming import NODE_RANK_LABEL
from rljob_runtime.cluster import embedded, idle_agent, ray_cluster
from rljob_runtime.cluster.embedded import EmbeddedCluster
from rljob_runtime.errors import ClusterError, SetupError
from tests.support.pace import HANG_S

PLAN = SimpleNamespace(
    components=[],
    nodes=[SimpleNamespace(group="local", rank=rank, num_devices=0, hardware=None, device_resource="nvidia.com/gpu") for rank in (0, 1)],
)

START_API_SERVER = embedded.Node.start_api_server


class Processes:
    """Ray's ``Cluster`` by its protocol; the second node of the first ``failures`` clusters times out."""

    failures = 0
    made: ClassVar[list["Processes"]] = []

    def __init__(self) -> None:
        self.address = f"127.0.0.1:{len(self.made)}"
        self.nodes: list[dict[str, object]] = []
        self.starts_api_server: list[bool] = []
        self.agents: list[tuple[str, ...]] = []
        self.stopped = False
        self.made.append(self)
        self.worker_niceness = os.environ["RAY_worker_niceness"]
        self.task_events_ms = os.environ["RAY_task_events_report_interval_ms"]

    def add_node(self, *, wait: bool, labels: dict[str, str], **arguments: object) -> None:
        kinds = (PROCESS_TYPE_DASHBOARD_AGENT, PROCESS_TYPE_RUNTIME_ENV_AGENT)
        commands = [services._build_python_executable_command_memory_profileable(kind, "/session") for kind in kinds]
        self.agents.append(tuple(command[-1] if idle_agent.__file__ in command else "Ray's" for command in commands))
        self.starts_api_server.append(embedded.Node.start_api_server is START_API_SERVER)
        if labels[NODE_RANK_LABEL] == "1" and len(self.made) <= self.failures:
            raise Exception("The current node timed out during startup")  # noqa: TRY002 - what Ray raises
        self.nodes.append({"labels": labels, **arguments})

    def shutdown(self) -> None:
        self.stopped = True


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def starting(failures: int, made: list[Processes]) -> str:
        monkeypatch.setattr(embedded, "RayProcesses", type("Failing", (Processes,), {"failures": failures, "made": made}))
        return EmbeddedCluster(tmp_path, {"local": 1}, {"local": {}}).start_processes(PLAN)

    return starting


@pytest.mark.parametrize("given", [None, "7"])
def test_workers_have_the_commands_own_priority_unless_somebody_says_otherwise(
    start, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    made: list[Processes] = []
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_worker_niceness", given)
    start(0, made)
    assert made[0].worker_niceness == (given or "0")


@pytest.mark.parametrize("given", [None, "1000"])
def test_no_call_is_recorded_for_a_dashboard_that_is_not_there_unless_somebody_asks(
    start, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    made: list[Processes] = []
    monkeypatch.delenv("RAY_task_events_report_interval_ms", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_task_events_report_interval_ms", given)
    start(0, made)
    assert made[0].task_events_ms == (given or "0")


@pytest.mark.parametrize(("given", "starts"), [(None, False), ("0", False), ("1", True)])
def test_rays_api_server_is_started_only_to_report_usage(start, monkeypatch: pytest.MonkeyPatch, given: str | None, starts: bool) -> None:
    made: list[Processes] = []
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", given)
    start(0, made)
    assert made[0].starts_api_server == [starts, starts]
    assert embedded.Node.start_api_server is START_API_SERVER


@pytest.mark.parametrize(("given", "dashboard"), [(None, "dashboard"), ("0", "dashboard"), ("1", "Ray's")])
def test_agents_import_nothing_of_ray_before_they_are_asked_unless_somebody_wants_rays_metrics(
    start, monkeypatch: pytest.MonkeyPatch, given: str | None, dashboard: str
) -> None:
    made: list[Processes] = []
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_enable_metrics_collection", given)
    unchanged = services._build_python_executable_command_memory_profileable
    start(0, made)
    assert made[0].agents == [(dashboard, "runtime_env")] * 2
    assert services._build_python_executable_command_memory_profileable is unchanged


def test_the_idle_agents_write_the_files_that_ray_waits_for() -> None:
    names = {_raylet.METRICS_AGENT_PORT_NAME, _raylet.METRICS_EXPORT_PORT_NAME, _raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME}
    assert (set(idle_agent.DASHBOARD_PORTS), idle_agent.RUNTIME_ENV_PORT) == (names, _raylet.RUNTIME_ENV_AGENT_PORT_NAME)


@pytest.mark.parametrize("port", [idle_agent.NOT_RUNNING, 6379])
def test_ray_reads_them(tmp_path: Path, port: int) -> None:
    node_id = "ab" * 28
    idle_agent.write_port({"session-dir": str(tmp_path), "node-id": node_id}, idle_agent.RUNTIME_ENV_PORT, port)
    assert _raylet.wait_for_persisted_port(str(tmp_path), node_id, idle_agent.RUNTIME_ENV_PORT, timeout_ms=1000) == port


def test_a_start_that_timed_out_is_made_once_more(start, caplog: pytest.LogCaptureFixture) -> None:
    made: list[Processes] = []
    with caplog.at_level(logging.WARNING):
        address = start(1, made)
    assert address == made[1].address
    assert [processes.stopped for processes in made] == [True, False]
    assert [len(processes.nodes) for processes in made] == [1, 2]
    assert "timed out during startup" in caplog.text


def test_a_start_that_never_succeeds_is_an_error_that_leaves_nothing(start) -> None:
    made: list[Processes] = []
    with pytest.raises(ClusterError, match="did not start in 2 attempts: The current node timed out"):
        start(9, made)
    assert [processes.stopped for processes in made] == [True, True]
    assert embedded.Node.start_api_server is START_API_SERVER


def plan_of(*nodes: tuple[str, int, str]) -> SimpleNamespace:
    """Nodes as (group, devices, resource), with a process on each of them but those of group ``idle``."""
    return SimpleNamespace(
        components=[
            SimpleNamespace(
                processes=[SimpleNamespace(node_rank=rank, devices=(7,)) for rank, node in enumerate(nodes) if node[0] != "idle"]
            )
        ],
        nodes=[
            SimpleNamespace(group=group, rank=rank, num_devices=devices, hardware=None, device_resource=resource)
            for rank, (group, devices, resource) in enumerate(nodes)
        ],
    )


def test_each_node_has_gpus_of_its_own_and_others_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Processes):
        def add_node(self, *, wait: bool, labels: dict[str, str], **arguments: object) -> None:
            seen.append(os.environ["RLJOB_POD_VISIBLE_DEVICES"])
            super().add_node(wait=wait, labels=labels, **arguments)

    monkeypatch.setattr(embedded, "RayProcesses", Watching)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,GPU-a")
    plan = plan_of(("a", 2, "nvidia.com/gpu"), ("c", 2, "cpu"), ("idle", 9, "nvidia.com/gpu"), ("b", 1, "nvidia.com/gpu"))
    names = ("a", "b", "c", "idle")
    EmbeddedCluster(tmp_path, dict.fromkeys(names, 1), {name: {} for name in names}).start_processes(plan)
    assert seen == ["4,5", "", "", "GPU-a"]
    assert "RLJOB_POD_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize(
    ("visible", "shown"), [("", "sees 0 (CUDA_VISIBLE_DEVICES is '')"), ("1,2", "sees 2 (CUDA_VISIBLE_DEVICES is '1,2')")]
)
def test_too_few_gpus_are_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, visible: str, shown: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(embedded, "RayProcesses", None)
    plan = plan_of(("a", 2, "nvidia.com/gpu"), ("a", 2, "nvidia.com/gpu"), ("c", 8, "cpu"))
    with pytest.raises(SetupError) as refused:
        EmbeddedCluster(tmp_path, {}, {}).start_processes(plan)
    assert "spec.nodeGroups need 4 GPUs (4 in a)" in str(refused.value)
    assert shown in str(refused.value)


class Node:
    """A node of Ray's by its protocol: some of its processes have ended."""

    def __init__(self, *dead: str) -> None:
        self.dead = list(dead)
        self.killed = False

    def dead_processes(self) -> list[tuple[str, object]]:
        return [(kind, object()) for kind in self.dead]

    def get_logs_dir_path(self) -> str:
        return "/session/logs"

    def kill_all_processes(self, *, check_alive: bool, allow_graceful: bool, wait: bool) -> None:
        self.killed = True


class Cluster(Processes):
    """Two nodes; a raylet of the first ended, which a run hears of from its workers."""

    def __init__(self) -> None:
        super().__init__()
        self.head_node, self.other = Node("raylet"), Node()

    def list_all_nodes(self) -> list[Node]:
        return [self.head_node, self.other]


class Group:
    """A placement group of Ray's that is placed at once."""

    id = SimpleNamespace(hex=lambda: "0123456789")

    def wait(self, timeout_s: float) -> bool:
        return True


class ActorClass:
    """What ``ray.remote`` makes of a class, by its protocol."""

    def options(self, **_: object) -> "ActorClass":
        return self

    def remote(self, *_: object) -> str:
        return "an actor"


async def nothing(*_: object) -> None:
    """What is waited for is there."""


def test_the_end_of_rays_control_service_is_noticed_and_all_is_killed_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Cluster] = []
    monkeypatch.setattr(embedded, "RayProcesses", type("Made", (Cluster,), {"made": made}))
    monkeypatch.setattr(embedded, "LOOK_S", 0.001)
    asked: list[object] = []
    monkeypatch.setattr(ray_cluster.ray, "kill", lambda actor, *, no_restart: asked.append(actor))
    monkeypatch.setattr(ray_cluster.ray, "shutdown", lambda: asked.append("shutdown"))
    monkeypatch.setattr(ray_cluster, "remove_placement_group", asked.append)
    monkeypatch.setattr(ray_cluster.ray, "init", lambda **_: None)
    monkeypatch.setattr(ray_cluster.ray, "remote", lambda **_: lambda _: ActorClass())
    monkeypatch.setattr(ray_cluster.RayWorker, "started", nothing)
    monkeypatch.setattr(ray_cluster, "wait_for_nodes", nothing)
    monkeypatch.setattr(ray_cluster, "placement_group", lambda *_, **__: Group())
    cluster = EmbeddedCluster(tmp_path, {"local": 1}, {"local": {}})
    spec = SimpleNamespace(name="w-0", node_rank=0, interpreter=None, concurrency=1)

    async def run() -> str:
        await cluster.start(plan_of(("local", 0, "cpu"), ("local", 0, "cpu")), HANG_S, print)
        await cluster.start_workers([spec], HANG_S)
        ended = asyncio.ensure_future(cluster.ended())
        await asyncio.sleep(0.01)
        assert not ended.done()
        (processes,) = made
        processes.head_node.dead.append("gcs_server")
        found = await asyncio.wait_for(ended, HANG_S)
        await cluster.stop()
        return found

    assert "/session/logs/gcs_server.out" in asyncio.run(run())
    assert asked == ["shutdown"]
    (processes,) = made
    assert [node.killed for node in processes.list_all_nodes()] == [True, True]
    assert processes.stopped
