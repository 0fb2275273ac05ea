"""The Ray cluster against the plan: every difference is named; and which devices a worker computes on."""

from pathlib import Path
from typing import Any

import pytest

from rljob_api.naming import ray_resource
from rljob_api.planner import plan
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.validation import check
from rljob_runtime.cluster import nodes as waiting
from rljob_runtime.cluster.host import pod_visible_devices
from rljob_runtime.cluster.nodes import missing_nodes, wait_for_nodes
from rljob_runtime.errors import ClusterError
from rljob_runtime.job import worker_settings
from tests.integration.jobs import job
from tests.unit.api.manifests import spec

GROUPS = [
    {"name": "gpus", "nodes": 2, "devicesPerNode": 2, "deviceResource": "nvidia.com/gpu", "env": [{"name": "A", "value": "1"}]},
    {
        "name": "virtual",
        "devicesPerNode": 1,
        "deviceResource": "example.com/virtual-gpu",
        "deviceType": "CPU",
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    },
    {"name": "cores", "devicesPerNode": 1, "deviceResource": "cpu", "resources": {"cpu": "1500m"}},
]
COMPONENTS = [
    {"name": "train", "role": "Trainer", "placement": {"nodeGroups": ["gpus"], "ranks": "0-3"}},
    {"name": "infer", "role": "Rollout", "placement": {"nodeGroups": ["virtual"], "ranks": "0"}},
    {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
]
CHECKED = check(job(Path("m"), steps=1, nodeGroups=GROUPS, components=COMPONENTS))


def node(rank: int | None, group: str, *, alive: bool = True, **resources: float) -> dict[str, Any]:
    labels = {"ray.io/node-group": group} | ({} if rank is None else {"rljob.dev/node-rank": str(rank)})
    return {"Alive": alive, "Labels": labels, "Resources": resources, "NodeManagerAddress": f"198.18.0.{rank}"}


VIRTUAL = ray_resource("example.com/virtual-gpu")
OTHER_GROUP = "node 2 at 198.18.0.2 is labeled ray.io/node-group=cores, planned virtual"
EVERY = [(0, "gpus", 0), (1, "gpus", 1), (2, "virtual", 0), (3, "cores", 0)]
HEAD = node(None, "headgroup", **{"node:__internal_head__": 1.0})
ALL = [
    HEAD,
    node(0, "gpus", GPU=2.0),
    node(1, "gpus", GPU=2.0),
    node(2, "virtual", **{VIRTUAL: 1.0}),
    node(3, "cores", rljob_cpu_device=1.0),
]


@pytest.mark.parametrize(
    ("nodes", "problems"),
    [
        (ALL, []),
        ([node(0, "gpus", GPU=2.0, **{"node:__internal_head__": 1.0}), *ALL[2:]], []),
        (ALL[:-1], ["node 3 (group cores, index 0) has not joined"]),
        ([*ALL[:2], node(1, "gpus", alive=False, GPU=2.0), *ALL[3:]], ["node 1 (group gpus, index 1) has not joined"]),
        ([*ALL[:2], node(1, "gpus", GPU=1.0), *ALL[3:]], ["node 1 (group gpus) offers 1 nvidia.com/gpu, planned 2"]),
        ([*ALL[:2], node(1, "gpus", GPU=8.0), *ALL[3:]], ["node 1 (group gpus) offers 8 nvidia.com/gpu, planned 2"]),
        ([*ALL[:2], node(1, "gpus"), *ALL[3:]], ["node 1 (group gpus) offers 0 nvidia.com/gpu, planned 2"]),
        (
            [*ALL[:3], node(2, "cores", **{VIRTUAL: 1.0}), ALL[4]],
            [OTHER_GROUP],
        ),
        ([*ALL, node(1, "gpus", GPU=2.0)], ["node 1 (group gpus) is there 2 times: 198.18.0.1, 198.18.0.1"]),
        ([*ALL, node(4, "gpus", GPU=2.0)], ["the node at 198.18.0.4 carries rljob.dev/node-rank=4, planned are 0 to 3"]),
        ([*ALL, node(None, "gpus", GPU=2.0)], ["the node at 198.18.0.None carries no label rljob.dev/node-rank"]),
        ([*ALL, node(1, "gpus", alive=False, GPU=2.0)], []),
        (
            [HEAD],
            [
                f"node {r} (group {g}, index {i}) has not joined"
                for r, g, i in [(0, "gpus", 0), (1, "gpus", 1), (2, "virtual", 0), (3, "cores", 0)]
            ],
        ),
    ],
)
def test_every_difference_is_named(nodes: list[dict[str, Any]], problems: list[str]) -> None:
    assert missing_nodes(CHECKED.plan, nodes) == problems


def test_a_node_with_robots_is_a_plain_node_that_offers_its_robots_once() -> None:
    franka = {"type": "Franka", "configs": [{"nodeRank": 0, "parameters": {"ip": ip}} for ip in ("192.0.2.10", "192.0.2.11")]}
    robots = {"role": "Environment", "placement": {"nodeGroups": ["arms"], "ranks": "all"}}
    wanted = spec([{"name": "arms", "nodes": 2, "hardware": franka}], [{"name": "robots"} | robots])
    offered = {"rljob_hardware": 1.0}
    assert missing_nodes(plan(wanted), [HEAD, node(0, "arms", **offered), node(1, "arms", **offered)]) == []
    assert missing_nodes(plan(wanted), [HEAD, node(0, "arms"), node(1, "arms")]) == [
        "node 0 (group arms) offers no rljob_hardware, which stands for its 2 Franka"
    ]


def test_the_component_chooses_the_interpreter_before_its_node_group() -> None:
    groups = [group | ({"pythonInterpreter": "/group/python"} if group["name"] == "gpus" else {}) for group in GROUPS]
    own = {"name": "reward", "role": "Reward", "pythonInterpreter": "/own/python", "placement": {"workers": 3}}
    wanted = spec(groups, [*COMPONENTS[:2], own])
    planned = plan(wanted)
    found = {c.name: [worker_settings.interpreter(wanted, planned, c, process) for process in c.processes] for c in planned.components}
    assert {i and (i.path, i.field) for i in found["train"]} == {("/group/python", "spec.nodeGroups[0].pythonInterpreter")}
    assert found["infer"] == [None]
    assert [i and (i.path, i.field) for i in found["reward"]] == [("/own/python", "spec.components[2].pythonInterpreter")] * 3


async def test_the_wait_says_what_is_missing_now_and_then_and_raises_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now_s = 0.0

        def monotonic(self) -> float:
            self.now_s += 1.0
            return self.now_s

    async def no_sleep(seconds: float) -> None:
        return None

    monkeypatch.setattr(waiting, "time", Clock())
    monkeypatch.setattr(waiting.asyncio, "sleep", no_sleep)
    monkeypatch.setattr(waiting.ray, "nodes", lambda: ALL[:-1])
    said: list[str] = []
    with pytest.raises(ClusterError, match=r"does not match .*startupDeadlineSeconds.*: node 3 \(group cores, index 0\) has not joined"):
        await wait_for_nodes(CHECKED.plan, 50.0, said.append)
    assert [line.split(": ")[0] for line in said] == [f"waiting for the planned nodes, {left} s left" for left in (34, 19, 4)]
    assert all(line.endswith("node 3 (group cores, index 0) has not joined") for line in said)


def on(plan: Plan, component: str) -> DeviceType:
    return worker_settings.device_type(CHECKED.job.spec, plan, plan.component(component).processes[0])


def test_what_computes_is_the_device_type_and_not_the_resource() -> None:
    assert on(CHECKED.plan, "train") is DeviceType.CUDA
    assert on(CHECKED.plan, "infer") is DeviceType.CPU
    local = check(job(Path("m"), steps=1))
    assert worker_settings.device_type(local.job.spec, local.plan, local.plan.components[0].processes[0]) is DeviceType.CPU


def test_cores_are_whole_and_secrets_are_left_to_the_container() -> None:
    assert worker_settings.node_cpus(CHECKED.job.spec)["cores"] == 1
    plan, spec = CHECKED.plan, CHECKED.job.spec
    train, infer = plan.component("train"), plan.component("infer")
    assert worker_settings.worker_env(spec, plan, train, train.processes[0])["A"] == "1"
    assert "TOKEN" not in worker_settings.worker_env(spec, plan, infer, infer.processes[0])


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),  # set by Ray for this process: says nothing about the pod
        ({"CUDA_VISIBLE_DEVICES": "4,5", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, "4,5"),
        ({"CUDA_VISIBLE_DEVICES": "4", "RLJOB_POD_VISIBLE_DEVICES": "4,5"}, "4,5"),
    ],
)
def test_the_pods_own_devices(environment: dict[str, str], expected: str | None) -> None:
    assert pod_visible_devices(environment) == expected
