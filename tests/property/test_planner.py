"""PLAN-PURE, UNIT-EXISTS and the two placement grammars, for any job."""

import json
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from rljob_api import device_mapping, planner, ranks
from rljob_api.errors import PlacementTextError
from rljob_api.plan import Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from tests.unit.api.manifests import manifest

NAMES = ["a", "b", "c"]
groups = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=3).map(
    lambda shapes: [{"name": NAMES[i], "nodes": nodes, "devicesPerNode": devices} for i, (nodes, devices) in enumerate(shapes)]
)
rank_texts = st.one_of(
    st.just("all"),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=1, max_size=3).map(
        lambda parts: ",".join(f"{start}-{start + more}" if more else f"{start}" for start, more in parts)
    ),
)
mapping_texts = st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True).map(device_mapping.format_ranks)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Manifests with any groups and components, many of them impossible."""
    drawn_groups = draw(groups)
    chosen = st.lists(st.sampled_from([group["name"] for group in drawn_groups]), max_size=2, unique=True)

    def component(role: str, index: int) -> dict[str, Any]:
        placement: dict[str, Any] = {"nodeGroups": draw(chosen)}
        if role == "Reward":
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
    roles = draw(st.lists(st.sampled_from(["Trainer", "Rollout", "Reference", "Reward"]), min_size=1, max_size=4))
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
        used = [device for process in component.processes for device in process.devices]
        assert len(used) == len(set(used)), "a device twice in one component"
        assert [process.rank for process in component.processes] == list(range(component.world_size))
        allowed = set(written.placement.node_groups) or {group.name for group in spec.node_groups}
        for process in component.processes:
            node = plan.nodes[process.node_rank]
            assert node.group in allowed
            assert len(process.devices) == (0 if written.role in planner.CPU_ROLES else planner.engine_size(written))
            assert all(owner[device] is node for device in process.devices), "a process on two nodes or on no device"
            assert process.local_devices == tuple(device - node.first_device for device in process.devices)
            there = [p for p in component.processes if p.node_rank == process.node_rank]
            assert (process.local_rank, process.local_world_size) == (there.index(process), len(there))
    for component in plan.components:
        sharing = {other.name for other in plan.components if other is not component and set(other.devices) & set(component.devices)}
        assert set(component.shares_devices_with) == sharing


parts = st.builds(
    lambda resources, processes: ranks.RankPart(resources=resources, processes=processes),
    st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda p: ranks.RankRange(start=p[0], end=p[0] + p[1]))),
    st.one_of(st.none(), st.tuples(st.integers(0, 99), st.integers(0, 9)).map(lambda p: ranks.RankRange(start=p[0], end=p[0] + p[1]))),
)


@given(st.lists(parts, min_size=1, max_size=5))
def test_rank_maps_parse_what_they_print(drawn: list[ranks.RankPart]) -> None:
    rank_map = ranks.RankMap(parts=tuple(drawn))
    assert ranks.parse(str(rank_map)) == rank_map
    assert ranks.parse(f" {str(rank_map).replace(',', ' ,, ').replace('-', ' - ')} ") == rank_map


@given(rank_texts, st.integers(1, 40))
def test_resolved_ranks_ascend_and_exist(text: str, num_available: int) -> None:
    try:
        resolved = list(ranks.parse(text).resolve(num_available))
    except PlacementTextError:
        return
    assert resolved == sorted(set(resolved))
    assert set(resolved) <= set(range(num_available))


@given(st.lists(st.integers(0, 99), min_size=1, max_size=20, unique=True))
def test_mappings_parse_what_they_print(wanted: list[int]) -> None:
    text = device_mapping.format_ranks(wanted)
    assert list(device_mapping.parse(text, 100)) == wanted


@given(st.text(alphabet="listrange()[],+*-0129 \n_.x'", max_size=60))
def test_no_text_does_anything_but_parse_or_fail(text: str) -> None:
    try:
        found = device_mapping.parse(text, 50)
    except PlacementTextError:
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
