"""What a worker process finds in its environment: RLinf's and torchrun's names with their meaning, and who wins over whom."""

import json
import math
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.planner import plan
from rljob_api.planning.environment import VARIABLES, worker_environment
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import check
from tests.layout.tree import ROOT
from tests.unit.api.manifests import manifest, spec

TWO_BY_EIGHT = [{"name": "a800", "nodes": 2, "devicesPerNode": 8}]
ARMS = {
    "name": "arms",
    "nodes": 2,
    "hardware": {
        "type": "Franka",
        "configs": [
            {"nodeRank": 1, "parameters": {"robotIp": "192.0.2.10"}},
            {"nodeRank": 0, "parameters": {"robotIp": "192.0.2.20"}},
            {"nodeRank": 1, "parameters": {"robotIp": "192.0.2.11", "cameras": ["07"]}},
        ],
    },
}


def found(job: RLJobSpec, component: str, rank: int) -> dict[str, str]:
    """The environment of one process."""
    planned = plan(job)
    of = planned.component(component)
    return worker_environment(job, planned, of, of.processes[rank])


def one(groups: list[dict[str, Any]], rank: int, **component: Any) -> dict[str, str]:
    """The environment of a process of a job with this one component."""
    return found(spec(groups, [{"name": "c", "role": "Trainer"} | component]), "c", rank)


def test_an_accelerator_process_finds_what_rlinf_gives_it() -> None:
    environment = one(TWO_BY_EIGHT, 2, placement={"ranks": "6-9"})
    # RLinf 0.3.0 for the same placement, process 2 of 4.
    of_rlinf = {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "NODE_RANK": "1",
        "CLUSTER_NODE_RANK": "1",
        "LOCAL_ACCELERATOR_RANK": "0",
        "NODE_LOCAL_RANK": "0",
        "NODE_LOCAL_WORLD_SIZE": "2",
        "VISIBLE_DEVICES": "0",
        "ACCELERATOR_TYPE": "NV_GPU",
        "ISOLATE_ACCELERATOR": "1",
        "LOCAL_HARDWARE_RANKS": "0",
        "NODE_GROUP_LABEL": "cluster",
        "CUDA_VISIBLE_DEVICES": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert {name: environment[name] for name in of_rlinf} == of_rlinf
    rest = {name: value for name, value in environment.items() if name not in of_rlinf}
    assert rest == {
        "RLJOB_COMPONENT": "c",
        "RLJOB_ROLE": "Trainer",
        "RLJOB_WORKER": "c-2",
        "RLJOB_NODE_GROUP": "a800",
        "RLJOB_HARDWARE_TYPE": "Accelerator",
        "RLJOB_HARDWARE": "[]",
    }


def test_the_node_rank_counts_the_nodes_of_the_component_and_the_cluster_node_rank_all() -> None:
    groups = [{"name": "first", "nodes": 3, "devicesPerNode": 1}, {"name": "second", "devicesPerNode": 1}]
    environment = one(groups, 1, placement={"ranks": "1,3"})
    assert (environment["NODE_RANK"], environment["CLUSTER_NODE_RANK"]) == ("1", "3")
    assert (environment["NODE_GROUP_LABEL"], environment["RLJOB_NODE_GROUP"]) == ("cluster", "second")
    named = one(groups, 0, placement={"nodeGroups": ["second"], "ranks": "0"})
    assert (named["NODE_RANK"], named["CLUSTER_NODE_RANK"], named["NODE_GROUP_LABEL"]) == ("0", "3", "second")


def test_an_engine_of_two_devices_sees_both_and_uses_the_first_as_its_own() -> None:
    rollout = {"role": "Rollout", "engine": {"tensorParallelSize": 2}}
    environment = one(TWO_BY_EIGHT, 1, placement={"deviceMapping": "[0, 1, 12, 10]"}, **rollout)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["LOCAL_HARDWARE_RANKS"]) == ("2,4", "2,4")
    assert (environment["LOCAL_ACCELERATOR_RANK"], environment["LOCAL_RANK"]) == ("2", "0")


@pytest.mark.parametrize(
    ("group", "make", "cuda"),
    [
        ({"deviceResource": "cpu"}, "cpu", ""),
        ({"deviceResource": "example.com/virtual-gpu", "deviceType": "CPU"}, "example.com/virtual-gpu", ""),
        ({"deviceResource": "amd.com/gpu"}, "AMD_GPU", "1"),
    ],
)
def test_devices_that_only_count_are_not_shown_to_cuda(group: dict[str, Any], make: str, cuda: str) -> None:
    environment = one([{"name": "g", "devicesPerNode": 2} | group], 0, placement={"ranks": "1"})
    assert (environment["VISIBLE_DEVICES"], environment["CUDA_VISIBLE_DEVICES"], environment["ACCELERATOR_TYPE"]) == ("1", cuda, make)


@pytest.mark.parametrize("placement", [{"workers": 2}, {"nodeGroups": ["node"], "ranks": "0:0-1"}])
def test_a_cpu_worker_on_a_gpu_node_sees_no_device(placement: dict[str, Any]) -> None:
    environment = one([{"name": "gpus", "devicesPerNode": 8}], 1, role="Reward", placement=placement)
    assert [environment[name] for name in ("CUDA_VISIBLE_DEVICES", "VISIBLE_DEVICES", "LOCAL_HARDWARE_RANKS")] == ["", "", ""]
    assert (environment["LOCAL_ACCELERATOR_RANK"], environment["ACCELERATOR_TYPE"]) == ("-1", "NV_GPU")
    assert (environment["NODE_LOCAL_RANK"], environment["NODE_LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert environment["RLJOB_HARDWARE_TYPE"] == ""


def test_robots_bring_the_parameters_of_their_own_pieces_and_no_gpu() -> None:
    on_gpu_nodes = ARMS | {"devicesPerNode": 8}
    placed = {"role": "Environment", "placement": {"nodeGroups": ["arms"], "ranks": "0,1-2:1"}}
    first, second = (one([on_gpu_nodes], rank, **placed) for rank in (0, 1))
    assert json.loads(first["RLJOB_HARDWARE"]) == [{"robotIp": "192.0.2.20"}]
    assert json.loads(second["RLJOB_HARDWARE"]) == [{"robotIp": "192.0.2.10"}, {"robotIp": "192.0.2.11", "cameras": ["07"]}]
    assert (second["LOCAL_HARDWARE_RANKS"], second["RLJOB_HARDWARE_TYPE"]) == ("0,1", "Franka")
    assert (second["CUDA_VISIBLE_DEVICES"], second["VISIBLE_DEVICES"], second["LOCAL_ACCELERATOR_RANK"]) == ("", "", "-1")


def test_the_component_wins_over_the_node_group_and_the_system_over_both() -> None:
    def variables(owner: str, *names: str) -> list[dict[str, Any]]:
        return [{"name": name, "value": owner} for name in names]

    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    groups = [{"name": "g", "devicesPerNode": 1, "env": [*variables("group", "A", "B", "RANK"), secret]}]
    environment = one(groups, 0, placement={"ranks": "0"}, env=variables("component", "B", "C", "WORLD_SIZE"))
    assert {name: environment[name] for name in ("A", "B", "C")} == {"A": "group", "B": "component", "C": "component"}
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("0", "1")
    assert "TOKEN" not in environment
    assert set(environment) == set(VARIABLES) | {"A", "B", "C"}


def test_parameters_that_json_cannot_say_are_refused() -> None:
    document = manifest()
    arms = json.loads(json.dumps(ARMS))
    arms["hardware"]["configs"][1]["parameters"] = {"limits": [{"force": math.inf}]}
    document["spec"]["nodeGroups"].append(arms)
    with pytest.raises(SpecInvalidError) as caught:
        check(document)
    assert [error.path for error in caught.value.errors] == ["spec.nodeGroups[1].hardware.configs[1].parameters.limits[0].force"]


def test_the_page_tells_users_about_every_variable() -> None:
    text = (ROOT / "docs" / "placement.md").read_text().split("## What a worker process sees")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `")]
    assert {name.strip("`"): meaning.replace("`", "") for name, meaning in cells} == dict(VARIABLES)
