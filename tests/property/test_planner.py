"""PLAN-PURE, UNIT-EXISTS and the two placement grammars, for any job."""

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from rljob_api import planner
from rljob_api.errors import PlacementError
from rljob_api.placement import device_mapping, ranks
from rljob_api.planning.component import engine_size
from rljob_api.planning.plan import Plan
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import Role
from tests.unit.api.manifests import manifest

NAMES = ["a", "b", "c"]


@st.composite
def node_groups(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Up to three groups of a few nodes: with devices, without, with robots."""
    result = []
    for name in NAMES[: draw(st.integers(1, 3))]:
        group: dict[str, Any] = {"name": name, "nodes": draw(st.integers(1, 3)), "devicesPerNode": draw(st.integers(0, 4))}
        if draw(st.integers(0, 4)) == 0:
            at = draw(st.lists(st.integers(0, group["nodes"] - 1), max_size=3))
            group["hardware"] = {"type": "Franka", "configs": [{"nodeRank": n, "parameters": {"ip": str(i)}} for i, n in enumerate(at)]}
        elif draw(st.integers(0, 4)) == 0:
            group["ignoreHardware"] = True
        result.append(group)
    return result


def rank_text(parts: list[tuple[int, int, int]]) -> str:
    """Parts that follow each other: gap before, units, processes (0: not given)."""
    texts, unit, process = [], 0, 0
    for gap, units, processes in parts:
        unit += gap
        text = f"{unit}-{unit + units - 1}" if units > 1 else f"{unit}"
        texts.append(f"{text}:{process}-{process + processes - 1}" if processes else text)
        unit, process = unit + units, process + (processes or units)
    return ",".join(texts)


wild_texts = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=3).map(
    lambda parts: ",".join(f"{start}-{start + more}" if more else f"{start}" for start, more in parts)
)
orderly_texts = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=3).map(rank_text)
rank_texts = st.one_of(st.just("all"), wild_texts, orderly_texts)
mapping_texts = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(device_mapping.format_ranks)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Manifests with any groups and components, many of them impossible."""
    drawn_groups = draw(node_groups())
    names = [*(group["name"] for group in drawn_groups), "cluster", "node"]
    chosen = st.lists(st.sampled_from(names), max_size=2, unique=True)

    def component(role: str, index: int) -> dict[str, Any]:
        placement: dict[str, Any] = {"nodeGroups": draw(chosen)}
        if role in ("Reward", "Environment") and draw(st.booleans()):
            placement["workers"] = draw(st.integers(1, 20))
        elif draw(st.booleans()):
            placement["ranks"] = draw(rank_texts)
        else:
            placement["deviceMapping"] = draw(mapping_texts)
        result = {"name": f"c{index}", "role": role, "placement": placement}
        if role == "Rollout":
            result["engine"] = {"tensorParallelSize": draw(st.integers(1, 3))}
        return result

    document = manifest()
    roles = draw(st.lists(st.sampled_from(["Trainer", "Rollout", "Reference", "Reward", "Environment"]), min_size=1, max_size=4))
    document["spec"]["nodeGroups"] = drawn_groups
    document["spec"]["components"] = [component(role, index) for index, role in enumerate(roles)]
    return document


def spec_of(document: dict[str, Any]) -> RLJobSpec:
    return RLJob.model_validate_json(json.dumps(document)).spec


def shuffled(value: Any, order: Any) -> Any:
    """The same data with the keys of every map in another order."""
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


@given(documents(), st.randoms(use_true_random=False))
def test_plan_pure(document: dict[str, Any], order: Any) -> None:
    spec = spec_of(document)
    before = spec.model_dump_json()
    first = planner.plan_or_errors(spec)
    assert spec.model_dump_json() == before
    assert planner.plan_or_errors(spec) == first
    assert planner.plan_or_errors(spec_of(shuffled(document, order))) == first


@given(documents())
def test_units_exist(document: dict[str, Any]) -> None:
    spec = spec_of(document)
    plan = planner.plan_or_errors(spec)
    if not isinstance(plan, Plan):
        assert plan, "neither a plan nor a reason"
        assert all(error.problem and error.remedy and error.path for error in plan)
        return
    assert [node.rank for node in plan.nodes] == list(range(len(plan.nodes)))
    owner = {node.first_device + i: node for node in plan.nodes for i in range(node.num_devices)}
    for component, written in zip(plan.components, spec.components, strict=True):
        assert [process.rank for process in component.processes] == list(range(component.world_size))
        used = [device for process in component.processes for device in process.devices]
        shared = written.role is Role.ROLLOUT and ":" in (written.placement.ranks or "")
        assert shared or TRAITS[written.role].takes_workers or len(used) == len(set(used)), "a device twice in one component"
        allowed = set(written.placement.node_groups) - {"cluster", "node"} or {group.name for group in spec.node_groups}
        there: dict[int, int] = {}
        for process in component.processes:
            node = plan.nodes[process.node_rank]
            assert node.group in allowed
            if not TRAITS[written.role].takes_workers:
                assert len(process.devices) == engine_size(written)
            assert len(set(process.devices)) == len(process.devices), "a device twice in one process"
            assert all(owner[device] is node for device in process.devices), "a process on two nodes or on no device"
            assert process.local_devices == tuple(device - node.first_device for device in process.devices)
            assert len(set(process.local_hardware)) == len(process.local_hardware)
            pieces = dict(node.hardware).get(process.hardware_type or "", 0)
            assert all(0 <= index < pieces for index in process.local_hardware), "a robot that is not there"
            assert process.local_rank == there.get(process.node_rank, 0)
            there[process.node_rank] = process.local_rank + 1
        assert all(process.local_world_size == there[process.node_rank] for process in component.processes)
        assert sorted({process.placement_node_rank for process in component.processes}) == list(range(len(there)))
    for component in plan.components:
        sharing = {other.name for other in plan.components if other is not component and set(other.devices) & set(component.devices)}
        assert set(component.shares_devices_with) == sharing


parts = st.builds(
    lambda resources, processes: ranks.RankPart(resources=resources, processes=processes),
    st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda p: ranks.RankRange(start=p[0], end=p[0] + p[1]))),
    st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda p: ranks.RankRange(start=p[0], end=p[0] + p[1]))),
)


@given(st.lists(parts, min_size=1, max_size=5))
def test_rank_maps_parse_what_they_print(parts: list[ranks.RankPart]) -> None:
    rank_map = ranks.RankMap(parts=tuple(parts))
    assert ranks.parse(str(rank_map)) == rank_map
    assert ranks.parse(f" {str(rank_map).replace(',', ' ,, ').replace('-', ' - ')} ") == rank_map


@given(rank_texts, st.integers(1, 40))
def test_ranks_of_processes_ascend_and_exist(text: str, num_available: int) -> None:
    try:
        processes = ranks.processes(text, num_available)
    except PlacementError:
        return
    units = [unit for process in processes for unit in process]
    assert units == sorted(units)
    assert set(units) <= set(range(num_available))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True))
def test_mappings_parse_what_they_print(wanted: list[int]) -> None:
    text = device_mapping.format_ranks(wanted)
    assert list(device_mapping.parse(text, 100)) == wanted


@given(st.text(alphabet="listrange()[],+*-0129 \n_.x'", max_size=60))
def test_no_text_does_anything_but_parse_or_fail(text: str) -> None:
    try:
        found = device_mapping.parse(text, 50)
    except PlacementError:
        return
    assert len(set(found)) == len(found) > 0


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_roll_and_rlinf_texts_compile_to_the_same_plan(nodes: int, devices: int, size: int) -> None:
    assume(nodes * devices % size == 0)
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": nodes, "devicesPerNode": devices}]
    results = []
    for placement in ({"ranks": "all"}, {"deviceMapping": f"list(range({nodes * devices}))", "devicesPerWorker": size}):
        document["spec"]["components"] = [{"name": "r", "role": "Rollout", "placement": placement, "engine": {"tensorParallelSize": size}}]
        result = planner.plan_or_errors(spec_of(document))
        results.append(result if isinstance(result, Plan) else len(result))
    assert results[0] == results[1]
