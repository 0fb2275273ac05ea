"""The conformance tool answers anything, quickly and in little memory, and what it accepts can exist."""

from __future__ import annotations

import copy
import json
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_convert.conformance.answers import result_of
from tests.support.cost import within

CASES: list[dict[str, Any]] = [
    entry["case"]
    for entry in json.loads((Path(__file__).parents[1] / "data" / "placement_cases.json").read_text(encoding="utf-8"))["cases"]
]
MAX_S = 2.0
MAX_GROWTH_BYTES = 200_000_000
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(("all", "0-3", "0-1:0-3", "node", "1:0")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def check_answer(result: dict[str, Any]) -> None:
    json.dumps(result)
    if not result["ok"]:
        assert set(result["error"]) == {"type", "message"}
        assert result["stage"]
        assert result["check"][0] in "GPSCKNFBVMAD"
        assert len(result["error"]["message"]) < 20_000
        return
    for component in result.get("components", {}).values():
        check_placements(component["placements"], result)


def check_placements(placements: list[dict[str, Any]], result: dict[str, Any]) -> None:
    """UNIT-EXISTS and the numbering of processes."""
    assert [each["rank"] for each in placements] == list(range(len(placements)))
    nodes = [each["cluster_node_rank"] for each in placements]
    assert nodes == sorted(nodes)
    per_node = Counter(nodes)
    for each in placements:
        kind = result["node_groups"][each["node_group_label"]]["hardware_type"]
        units = each["local_hardware_ranks"]
        there = result["nodes"][each["cluster_node_rank"]]["hardware"].get(kind, 0)
        assert all(0 <= unit < there for unit in units)
        assert len(set(units)) == len(units)
        assert each["local_world_size"] == per_node[each["cluster_node_rank"]]


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


@given(JSON)
@settings(max_examples=150, deadline=None)
def test_any_json_is_answered(case: Any) -> None:
    check_answer(result_of(case))


@given(st.sampled_from(CASES), st.data())
@settings(max_examples=400, deadline=None)
def test_mutated_cases_are_answered(case: dict[str, Any], data: st.DataObject) -> None:
    mutated = copy.deepcopy(case)
    path = data.draw(st.sampled_from(places(mutated)[1:]))
    holder: Any = mutated
    for key in path[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()):
        holder[path[-1]] = data.draw(JSON)
    elif isinstance(holder, dict):
        del holder[path[-1]]
    check_answer(result_of(mutated))


BIG = {"num_nodes": 16_384, "accelerators_per_node": 8}
SMALL = {"num_nodes": 2, "accelerators_per_node": 8}


def placed(placement: object, machines: object = SMALL, **extra: object) -> dict[str, Any]:
    return {"kind": "hybrid", "cluster": machines, "config": {"cluster": {"component_placement": placement}}} | extra


def nested(depth: int) -> object:
    value: object = "0"
    for _ in range(depth):
        value = [value]
    return value


HUGE: dict[str, Any] = {
    "resource ranks": placed({"a": "0-999999999"}),
    "process ranks": placed({"a": "0:0-999999999"}),
    "num_nodes": {"kind": "hybrid", "cluster": SMALL, "config": {"cluster": {"component_placement": {"a": "0"}, "num_nodes": 10**9}}},
    "simulated nodes": placed({"a": "0"}, {"num_nodes": 10**9}),
    "list of nodes": placed({"a": "0"}, {"nodes": [{} for _ in range(10**5)]}),
    "accelerators": placed({"a": "all"}, {"num_nodes": 1, "accelerators_per_node": 10**9}),
    "million devices": placed({"a": "all"}, {"num_nodes": 125_000, "accelerators_per_node": 8}),
    "deep": placed({"a": nested(50_000)}),
    "long integer": placed({"a": 10**5000}),
    "labels": placed({"a": {"node_group": ",".join(["cluster"] * 20_000), "placement": "0"}}, BIG),
    "names": placed({",".join(f"c{index}" for index in range(40_000)): "0-7"}),
    "everything visible": placed({"a": "0:0-16383"}, {"num_nodes": 1, "accelerators_per_node": 1024}, isolate_accelerator=False),
    "parts": placed({"a": ",".join(map(str, range(40_000)))}, BIG),
    "strategy": {"kind": "packed", "cluster": SMALL, "strategy_args": {"start_hardware_rank": 0, "end_hardware_rank": 10**12}},
    "rank text": {"kind": "parse_rank", "rank_config": "0-999999999", "available_ranks": None, "rank_type": "node"},
    "yaml": {"kind": "hybrid", "cluster": SMALL, "config_yaml": "[" * 100_000},
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_cases_are_refused_at_once(name: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(MAX_S):
        result: Any = result_of(HUGE[name])
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES
    assert not result["ok"]
    check_answer(result)


def test_the_largest_accepted_case_stays_small() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with within(MAX_S):
        result: Any = result_of(placed({"a": "0-16383"}, BIG))
    assert result["ok"]
    assert len(json.dumps(result)) > 1_000_000
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH_BYTES


@given(
    st.sampled_from([case for case in CASES if len(case.get("config", {}).get("cluster", {}).get("component_placement", ())) > 1]),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_order_of_keys_does_not_matter(case: dict[str, Any], random: Any) -> None:
    shuffled = copy.deepcopy(case)
    section = shuffled["config"]["cluster"]["component_placement"]
    keys = list(section)
    random.shuffle(keys)
    shuffled["config"]["cluster"]["component_placement"] = {key: section[key] for key in keys}
    assert result_of(case)["ok"] == result_of(shuffled)["ok"]
    assert result_of(case).get("components") == result_of(shuffled).get("components")
