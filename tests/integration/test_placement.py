"""Processes run where the plan says, with the environment the plan says: asked of Ray and of the processes themselves."""

import asyncio
import dataclasses
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from rljob_api.naming import NODE_RANK_LABEL
from rljob_api.plan import Plan, PlannedComponent
from rljob_api.planner import plan
from rljob_api.v1alpha1 import RLJobSpec
from rljob_runtime import launch, resolve
from rljob_runtime.cluster.embedded import EmbeddedCluster
from rljob_runtime.cluster.protocol import Worker, WorkerSpec
from rljob_runtime.cluster.ray_cluster import RayCluster
from rljob_runtime.errors import SetupError
from tests.layout.tree import ROOT
from tests.unit.api.manifests import spec

pytestmark = pytest.mark.timeout(300)
START_S = 90.0

GROUPS: list[dict[str, Any]] = [
    {"name": "small", "devicesPerNode": 2, "deviceResource": "cpu", "env": [{"name": "SITE", "value": "small"}]},
    {"name": "large", "devicesPerNode": 4, "env": [{"name": "SITE", "value": "large"}, {"name": "OWNER", "value": "group"}]},
    {
        "name": "arms",
        "devicesPerNode": 1,
        "hardware": {"type": "Franka", "configs": [{"nodeRank": 0, "parameters": {"ip": f"192.0.2.{n}"}} for n in (10, 11)]},
    },
    {"name": "cores"},
]
"""Nodes 0 to 3. The GPUs are Ray's word against nobody's: no process touches them."""
COMPONENTS: list[dict[str, Any]] = [
    {
        "name": "trainer",
        "role": "Trainer",
        "placement": {"nodeGroups": ["large"], "ranks": "all"},
        "env": [{"name": "OWNER", "value": "component"}],
    },
    {
        "name": "strided",
        "role": "Rollout",
        "placement": {"nodeGroups": ["large"], "ranks": "all"},
        "engine": {"tensorParallelSize": 2},
    },
    {"name": "shared", "role": "Rollout", "placement": {"nodeGroups": ["small"], "ranks": "0:0-1"}},
    {
        "name": "backwards",
        "role": "Rollout",
        "placement": {"nodeGroups": ["large", "small"], "ranks": "2-5:0-1"},
        "engine": {"tensorParallelSize": 2},
    },
    {"name": "scattered", "role": "Rollout", "placement": {"deviceMapping": "[5, 0]"}},
    {"name": "pairs", "role": "Rollout", "placement": {"deviceMapping": "[0, 1] + [2, 5]"}, "engine": {"tensorParallelSize": 2}},
    {"name": "by_node", "role": "Reward", "placement": {"nodeGroups": ["node"], "ranks": "1:0-1,3:2"}},
    {"name": "round", "role": "Reward", "placement": {"workers": 5}},
    {"name": "robots", "role": "Environment", "placement": {"nodeGroups": ["arms"], "ranks": "all"}},
]
EXPECTED: dict[str, list[tuple[int, str, str]]] = {
    "trainer": [(1, "0", "0"), (1, "1", "1"), (1, "2", "2"), (1, "3", "3")],
    "strided": [(1, "0,2", "0,2"), (1, "1,3", "1,3")],
    "shared": [(0, "0", ""), (0, "0", "")],
    "backwards": [(0, "0,1", ""), (1, "2,3", "2,3")],
    "scattered": [(1, "3", "3"), (0, "0", "")],
    "pairs": [(0, "0,1", ""), (1, "0,3", "0,3")],
    "by_node": [(1, "", ""), (1, "", ""), (3, "", "")],
    "round": [(0, "", ""), (1, "", ""), (2, "", ""), (3, "", ""), (0, "", "")],
    "robots": [(2, "0", ""), (2, "1", "")],
}
"""Node rank, LOCAL_HARDWARE_RANKS and CUDA_VISIBLE_DEVICES of every process, by rank."""


def job(components: list[dict[str, Any]], groups: list[dict[str, Any]] | None = None) -> RLJobSpec:
    made = spec(groups or GROUPS, components)
    return made.model_copy(update={"training": made.training.model_copy(update={"tensor_parallel_size": 4})})


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The four nodes, without a driver."""
    nodes = plan(job(COMPONENTS))
    names = [group["name"] for group in GROUPS]
    cluster = EmbeddedCluster(tmp_path_factory.mktemp("nodes"), dict.fromkeys(names, 1), {name: {} for name in names})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # the probe, in the processes of all nodes
        patch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield cluster.start_processes(nodes)
        asyncio.run(cluster.stop())


def probes(wanted: RLJobSpec, planned: Plan, component: PlannedComponent, folder: Path) -> list[WorkerSpec]:
    """The very specs of a real job's workers, but for what is constructed."""
    specs = launch.worker_specs(wanted, planned, component, None, folder)
    return [dataclasses.replace(s, factory="tests.integration.placement_probe:Probe", kwargs={}, concurrency=1) for s in specs]


async def answers(workers: list[Worker]) -> list[tuple[int, str, dict[str, str]]]:
    """Planned rank of the node that each worker is on, by Ray's labels; its interpreter; its environment."""
    ranks = {node["NodeID"]: node["Labels"].get(NODE_RANK_LABEL) for node in ray.nodes()}
    found = await asyncio.gather(*(worker.call("where", timeout_s=START_S) for worker in workers))
    return [(int(ranks[node]), interpreter, environment) for node, interpreter, environment in found]


async def test_every_process_is_where_the_plan_says_with_the_environment_the_plan_says(address: str, tmp_path: Path) -> None:
    wanted = job(COMPONENTS)
    planned = plan(wanted)
    specs = {c.name: probes(wanted, planned, c, tmp_path) for c in planned.components}
    cluster = RayCluster(address, tmp_path)
    try:
        await cluster.start(planned, START_S, lambda _: None)
        found = iter(await answers(await cluster.start_workers([s for of in specs.values() for s in of], START_S)))
    finally:
        await cluster.stop()
    told: dict[str, list[tuple[int, str, str]]] = {}
    for component in planned.components:
        told[component.name] = []
        for process in component.processes:
            node_rank, _, environment = next(found)
            promised = resolve.worker_env(wanted, planned, component, process)
            assert {name: environment.get(name) for name in promised} == promised
            assert (node_rank, environment["RLJOB_WORKER"]) == (process.node_rank, f"{component.name}-{process.rank}")
            told[component.name].append((node_rank, environment["LOCAL_HARDWARE_RANKS"], environment["CUDA_VISIBLE_DEVICES"]))
            if component.name == "trainer":
                assert (environment["SITE"], environment["OWNER"]) == ("large", "component")
            if component.name == "robots":
                assert environment["RLJOB_HARDWARE"] == f'[{{"ip": "192.0.2.{10 + process.rank}"}}]'
    assert told == EXPECTED


OTHER_JOB = """
import asyncio, sys
from pathlib import Path
from rljob_api.planner import plan
from rljob_runtime.cluster.ray_cluster import RayCluster
from rljob_runtime.errors import ClusterError
from tests.integration.test_placement import ON_LARGE, job

async def main(address, folder, timeout_s):
    cluster = RayCluster(address, Path(folder))
    try:
        await cluster.start(plan(job(ON_LARGE)), float(timeout_s), lambda _: None)
        print("has its devices", flush=True)
    except ClusterError as error:
        print(error, flush=True)
    finally:
        await cluster.stop()

asyncio.run(main(*sys.argv[1:]))
"""
ON_LARGE = [{"name": "trainer", "role": "Trainer", "placement": {"nodeGroups": ["large"], "ranks": "0"}}]


def other_job(address: str, folder: Path, timeout_s: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", OTHER_JOB, address, str(folder), str(timeout_s)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)


def held_and_waiting() -> tuple[int, int]:
    """Placement groups that have their devices, and that wait for them."""
    states = [group["state"] for group in placement_group_table().values()]
    return states.count("CREATED"), states.count("PENDING")


async def test_a_second_job_waits_for_the_devices_of_the_first_and_fails_at_its_deadline(address: str, tmp_path: Path) -> None:
    """One device of a node in use is the whole node in use: the jobs name devices, and might name the same."""
    first = RayCluster(address, tmp_path)
    await first.start(plan(job(ON_LARGE)), START_S, lambda _: None)
    try:
        hasty, patient = other_job(address, tmp_path, 1.0), other_job(address, tmp_path, 100.0)
        text, _ = await asyncio.to_thread(hasty.communicate, timeout=START_S)
        assert text.startswith("the devices were not free within the time that spec.startupDeadlineSeconds sets; wanted node 1 (large): {")
        assert "Stop the job that holds them or raise the deadline" in text
        deadline = time.monotonic() + START_S
        while held_and_waiting() != (1, 1) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert held_and_waiting() == (1, 1), "the second job waits"
        assert patient.poll() is None
    finally:
        await first.stop()
    text, _ = await asyncio.to_thread(patient.communicate, timeout=START_S)
    assert text == "has its devices\n"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


async def test_workers_run_on_the_interpreter_of_their_component_else_of_their_group(address: str, tmp_path: Path) -> None:
    of_group, of_component = (
        script(tmp_path / f"the python of a {owner}", f'export INTERPRETER={owner}; exec "{sys.executable}" "$@"')
        for owner in ("group", "component")
    )
    groups = [group | ({"pythonInterpreter": str(of_group)} if group["name"] in ("large", "cores") else {}) for group in GROUPS]
    components = [
        *ON_LARGE,
        {"name": "robots", "role": "Environment", "placement": {"nodeGroups": ["arms"], "ranks": "0"}},
        {"name": "own", "role": "Reward", "placement": {"nodeGroups": ["cores"], "workers": 1}, "pythonInterpreter": str(of_component)},
    ]
    wanted = job(components, groups)
    planned = plan(wanted)
    cluster = RayCluster(address, tmp_path)
    try:
        await cluster.start(planned, START_S, lambda _: None)
        specs = [s for c in planned.components for s in probes(wanted, planned, c, tmp_path)]
        found = await answers(await cluster.start_workers(specs, START_S))
    finally:
        await cluster.stop()
    assert [environment.get("INTERPRETER") for _, _, environment in found] == ["group", None, "component"]
    assert [node_rank for node_rank, _, _ in found] == [1, 2, 3]


async def test_an_interpreter_that_cannot_run_workers_is_named_with_its_node_and_field(address: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "python"
    broken = script(tmp_path / "broken", "echo 'libpython3.11.so.1.0: no such file' >&2; exit 127")
    bare = script(tmp_path / "bare", f'exec "{sys.executable}" -S "$@"')  # without site-packages
    groups = [group | ({"pythonInterpreter": str(broken)} if group["name"] == "large" else {}) for group in GROUPS]
    components = [
        *ON_LARGE,
        {"name": "lost", "role": "Reward", "placement": {"nodeGroups": ["cores"], "workers": 2}, "pythonInterpreter": str(missing)},
        {"name": "poor", "role": "Reward", "placement": {"nodeGroups": ["cores"], "workers": 1}, "pythonInterpreter": str(bare)},
    ]
    wanted = job(components, groups)
    planned = plan(wanted)
    cluster = RayCluster(address, tmp_path)
    started = time.monotonic()
    try:
        await cluster.start(planned, START_S, lambda _: None)
        with pytest.raises(SetupError) as caught:
            await cluster.start_workers([s for c in planned.components for s in probes(wanted, planned, c, tmp_path)], START_S)
    finally:
        await cluster.stop()
    text = str(caught.value)
    lost, poor = "spec.components[1].pythonInterpreter", "spec.components[2].pythonInterpreter"
    on_large = f"{broken} on node 1 (group large) cannot run a worker (exit 127): libpython3.11.so.1.0: no such file"
    assert f"spec.nodeGroups[1].pythonInterpreter: {on_large}; " in text
    assert f"{lost}: {missing} on node 3 (group cores) does not exist" in text
    assert f"{poor}: {bare} on node 3 (group cores) cannot run a worker (exit 1): ModuleNotFoundError: No module named 'ray'" in text
    assert text.count(str(missing)) == 1, "two workers, one interpreter, one message"
    assert time.monotonic() - started < START_S / 2, "well before the deadline"
