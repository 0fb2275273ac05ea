"""The 218 recorded outcomes of RLinf 0.3.0: equal by the three rules of the case format, or an intended difference with its own test."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import PlacementError
from rljob_convert.conformance.answers import result_of, run_lines
from rljob_convert.conformance.hardware import parse_hardware

RECORDED: dict[str, dict[str, Any]] = {
    entry["case"]["name"]: entry
    for entry in json.loads((Path(__file__).parents[2] / "data" / "placement_cases.json").read_text(encoding="utf-8"))["cases"]
}

REJECTED = "rejected"
ACCEPTED = "accepted"
INTENDED: dict[str, tuple[str, str]] = {
    "multi_group_list_BROKEN": ("D1", ACCEPTED),
    "multi_group_single_item_list_BROKEN": ("D1", ACCEPTED),
    "err_group_node_ranks_yaml_list": ("D2", ACCEPTED),
    "mp_collocated_node_group_ignored": ("D3", ACCEPTED),
    "mp_collocated_process_ranks_ignored": ("D3", REJECTED),
    "packed_BUG_off_by_one_overflow": ("D4", REJECTED),
    "packed_BUG_hetero_overflow": ("D4", REJECTED),
    "mp_collocated_BUG_straddle": ("D4", REJECTED),
    "multi_group_reversed_order_error": ("D5", ACCEPTED),
    "multi_group_cpu_reversed": ("D5", ACCEPTED),
    "packed_group_multi_reversed": ("D5", ACCEPTED),
    "node_groups_reversed": ("D5", ACCEPTED),
    "multi_group_same_twice": ("D6", REJECTED),
    "multi_group_same_twice_one_process": ("D6", REJECTED),
    "multi_group_same_node_twice_spanning": ("D6", REJECTED),
    "process_ranks_start_nonzero": ("D7", REJECTED),
    "process_ranks_start_nonzero_then_implicit": ("D7", REJECTED),
    "multi_group_mixed_accel_and_none": ("D8", REJECTED),
    "yaml_sexagesimal_1_0": ("D9", REJECTED),
    "yaml_octal_010": ("D9", REJECTED),
    "yaml_underscore": ("D9", REJECTED),
    "pr_plus": ("D9", REJECTED),
    "pr_underscore": ("D9", REJECTED),
    "pr_unicode": ("D9", REJECTED),
    "err_env_same_key_on_two_nodes": ("D10", ACCEPTED),
    "mp_collocated_atp2_rtp4": ("D11", ACCEPTED),
    "mp_disagg_unmapped_engines_rollout_not_multiple_of_actor": ("D11", ACCEPTED),
    "mp_disagg_sync_err_rtp_gt_atp": ("D11", ACCEPTED),
    "mp_disagg_sync_err_rollout_smaller_than_actor_tp": ("D11", ACCEPTED),
    "unranked_sort_by_ip_string": ("D13", ACCEPTED),
    "unranked_grouped_by_accel_type_head_first": ("D13", ACCEPTED),
    "mp_auto_with_critic_falls_back": ("D14", REJECTED),
    "mp_disagg_critic_inference_overlaps_actor_accepted": ("D15", REJECTED),
    "robot_duplicate_with_list_field_not_detected_in_0_3_0": ("D18", REJECTED),
    "err_doc_example_agent_201_processes": ("D19", ACCEPTED),
    "dict_extra_keys_ignored": ("D20", REJECTED),
    "component_key_trailing_comma": ("D20", REJECTED),
}
"""Case, id of the difference, our outcome."""

CLASSES: tuple[tuple[str, str], ...] = (
    (r"Node group not found for components|placement must be specified", "G"),
    (r"Invalid rank (map string|format)|Error parsing resource|No valid (resource|process)|Duplicate (resource|process)", "P"),
    (r"(Resource|Process) ranks must|latter part|When rank_config|The number of process ranks|^(Start|End) rank|list index", "P"),
    (r"is allocated to node ranks|Error in component placement", "S"),
    (r"multiple placements", "C"),
    (r"NODE_RANK|labels must be unique|The cluster is initialized|^Waiting for", "N"),
    (r"must be divisible by num_hardware|exceed available|Packed placement|Trouble finding|hardware rank .* must be", "B"),
    (r"Node group with label|sorted by node_id|^Hardware rank|must be on the same node|must be unique", "F"),
    (r"same hardware type|hardware_ranks_list must", "F"),
    (r"^Node rank .* out of range|overlapping nodes|node_ranks list must", "V"),
    (r"GPUs must be specified|must be continuous|must not be specified|AUTO mode|does not match either|TP size", "M"),
    (r"during multi-agent|not subsets of actor|Resource Conflict", "A"),
)
"""Class of check by the text of RLinf's error; everything at the stage cluster_config is K."""


def class_of(error: Mapping[str, str], stage: str) -> str:
    if stage == "cluster_config":
        return "K"
    return next(name for pattern, name in CLASSES if re.search(pattern, error["message"]))


def comparable(placement: Mapping[str, Any], expected: Mapping[str, Any], isolated: bool) -> dict[str, Any]:
    """Without the fields that count for isolated accelerators only."""
    kind = expected["node_groups"][placement["node_group_label"]]["hardware_type"]
    left_out = (
        ()
        if isolated and kind == "Accelerator" and placement["local_hardware_ranks"]
        else ("local_accelerator_rank", "visible_accelerators")
    )
    return {key: value for key, value in placement.items() if key not in left_out}


def problem_of(case: Mapping[str, Any], expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """What differs by the first two rules; None when nothing does."""
    components = expected.get("components", {})
    sync_map = expected.get("weight_sync_map") or {}
    if not expected["ok"] or "error" in sync_map or any("error" in each for each in components.values()):
        return refusal_problem(expected, got)
    if any("anomalies" in each for each in components.values()):
        return "RLinf's placement is impossible"
    if not got["ok"]:
        return f"refused: {got['error']['message']}"
    if got.get("ranks") != expected.get("ranks"):
        return "ranks"
    for key in ("nodes", "node_groups", "mode", "rollout_sync_mode"):
        if key in expected and got[key] != expected[key]:
            return f"{key}: {got[key]}"
    for name in components:
        problem = component_problem(name, case, expected, got)
        if problem:
            return problem
    if sync_map and got["weight_sync_map"] != {rank: as_pairs(shards) for rank, shards in sync_map.items()}:
        return f"sync map: {got['weight_sync_map']}"
    return None


def refusal_problem(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """What differs where RLinf refuses, at admission or later."""
    errors = [(each["error"], "get_placement") for each in expected.get("components", {}).values() if "error" in each]
    if not expected["ok"]:
        errors = [(expected["error"], expected["stage"])]
    classes = [class_of(error, stage) for error, stage in errors] or ["D11"]
    check = got.get("check", "accepted")
    return None if check in classes or check[0] in classes else f"{check} instead of one of {classes}: {errors}"


def component_problem(name: str, case: Mapping[str, Any], expected: Mapping[str, Any], got: Mapping[str, Any]) -> str | None:
    """What differs in one component."""
    isolated = case.get("isolate_accelerator", True)
    component, ours = expected["components"][name], got["components"][name]
    theirs = [comparable(each, expected, isolated) for each in component["placements"]]
    if [comparable(each, expected, isolated) for each in ours["placements"]] != theirs:
        return f"placements of {name}: {ours['placements']}"
    for key in ("strategy", "world_size", "hardware_ranks", "rank_map"):
        if key in component and ours[key] != component[key]:
            return f"{key} of {name}: {ours[key]}"
    if isolated and "workers" in component and all(each["local_hardware_ranks"] for each in component["placements"]):
        return workers_problem(component["workers"], ours["workers"], component["placements"], expected)
    return None


def workers_problem(theirs: list[Any], ours: list[Any], placements: list[Any], expected: Mapping[str, Any]) -> str | None:
    """Robots see no accelerators (D17), all else is equal."""
    for their, our, placement in zip(theirs, ours, placements, strict=True):
        kind = expected["node_groups"][placement["node_group_label"]]["hardware_type"]
        if kind == "Accelerator" and their != our:
            return str(our)
        if (their["node_group_env"], their["python"]) != (our["node_group_env"], our["python"]):
            return str(our)
        if kind != "Accelerator" and our["env"]["VISIBLE_DEVICES"]:
            return "a robot process sees accelerators"
    return None


def as_pairs(shards: list[Any]) -> list[Any]:
    return [shards] if shards and not isinstance(shards[0], list) else shards


def test_all_cases_are_there() -> None:
    assert len(RECORDED) == 218
    assert set(INTENDED) <= set(RECORDED)


@pytest.mark.parametrize("name", [name for name in RECORDED if name not in INTENDED])
def test_agrees_with_rlinf(name: str) -> None:
    entry = RECORDED[name]
    assert problem_of(entry["case"], entry["expected"], result_of(entry["case"])) is None


@pytest.mark.parametrize("name", INTENDED)
def test_differs_as_intended(name: str) -> None:
    difference, outcome = INTENDED[name]
    entry = RECORDED[name]
    result = result_of(entry["case"])
    assert result["difference"] == difference
    assert result["ok"] is (outcome == ACCEPTED), result
    assert problem_of(entry["case"], entry["expected"], result) is not None


def placements_of(name: str, component: str) -> list[tuple[int, list[int]]]:
    result: Any = result_of(RECORDED[name]["case"])
    return [(each["cluster_node_rank"], each["local_hardware_ranks"]) for each in result["components"][component]["placements"]]


def test_groups_against_node_order_are_ordered_by_node() -> None:
    assert placements_of("multi_group_reversed_order_error", "actor") == [(0, [0]), (0, [1]), (1, [6]), (1, [7])]
    assert placements_of("packed_group_multi_reversed", "_") == [(0, [0]), (0, [1]), (1, [6]), (1, [7])]


def test_model_parallel_honors_its_node_group() -> None:
    assert placements_of("mp_collocated_node_group_ignored", "actor") == [(1, [index]) for index in range(8)]


def test_lists_of_groups_count_through_both() -> None:
    assert placements_of("multi_group_list_BROKEN", "actor") == [(0, [6]), (0, [7]), (1, [0]), (1, [1])]


def test_machines_without_ranks_keep_their_order() -> None:
    assert placements_of("unranked_sort_by_ip_string", "actor") == [(0, [0]), *((1, [i]) for i in range(2)), *((2, [i]) for i in range(4))]


@pytest.mark.parametrize("name", [name for name, (difference, _) in INTENDED.items() if difference == "D11"])
def test_every_engine_shard_is_fed(name: str) -> None:
    result: Any = result_of(RECORDED[name]["case"])
    fed = {tuple(shard) for shards in result["weight_sync_map"].values() for shard in shards}
    engines = result["components"]["rollout"]["placements"]
    assert fed == {(engine["rank"], shard) for engine in engines for shard in range(len(engine["local_hardware_ranks"]))}


def test_variables_may_differ_between_nodes_of_a_group() -> None:
    case = json.loads(json.dumps(RECORDED["err_env_same_key_on_two_nodes"]["case"]))
    case["config"]["cluster"]["component_placement"] = {"actor": {"node_group": "g", "placement": "7-8"}}
    result: Any = result_of(case | {"worker_env": True})
    assert [worker["node_group_env"] for worker in result["components"]["actor"]["workers"]] == [{"A": "1"}, {"A": "2"}]


def cluster_case(**cluster: object) -> dict[str, Any]:
    return {"kind": "hybrid", "cluster": {"num_nodes": 2}, "config": {"cluster": {"component_placement": {"actor": "0"}, **cluster}}}


def test_unknown_cluster_key_gets_a_suggestion() -> None:
    result: Any = result_of(cluster_case(auto_schedular=True))
    assert (result["check"], result["difference"]) == ("D20", "D20")
    assert "auto_scheduler" in result["error"]["message"]


def test_robots_of_a_nodes_environment_count() -> None:
    case = cluster_case(node_groups=[{"label": "arms", "node_ranks": "0", "hardware_type": "Franka"}])
    case["cluster"] = {"nodes": [{"accelerators": 2, "env": {"ROBOT_IP": "10.0.0.5,10.0.0.6"}}]}
    result: Any = result_of(case)
    assert result["node_groups"]["arms"]["hardware_resource_count"] == 2


def test_lines() -> None:
    good = json.dumps(RECORDED["range_implicit"]["case"])
    results = [json.loads(line) for line in run_lines([good, "", "not json", "[" * 100_000, "[]", "9" * 5_000])]
    assert [result["ok"] for result in results] == [True, False, False, False, False]
    assert all(result["check"] == "K3" for result in results[1:])


def test_generic_hardware_is_taken_only_where_allowed() -> None:
    section = {"type": "Gripper", "configs": [{"node_rank": 1, "port": 7}, {"node_rank": 1, "port": 8}]}
    hardware = parse_hardware(section, "hardware", allow_generic=True)
    assert (hardware.node_ranks, hardware.parameters) == ((1, 1), ({"port": 7}, {"port": 8}))
    with pytest.raises(PlacementError, match="unknown type") as refused:
        parse_hardware(section, "hardware")
    assert refused.value.check == "K10"


def test_lists_of_groups_explain_more_than_the_order_of_machines() -> None:
    case = cluster_case(component_placement={"actor": {"node_group": ["node"], "placement": "0-1"}})
    case["cluster"] = {"nodes": [{"node_rank": None, "ip": "10.0.0.2"}, {"node_rank": None, "ip": "10.0.0.1"}], "head": 1}
    result = result_of(case)
    assert (result["difference"], result["differences"]) == ("D1", ["D1", "D13"])
