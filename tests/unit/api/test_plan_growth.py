"""Planning is linear in devices, counted in function calls, which no machine changes; the bench gives both planners the same jobs."""

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from bench.placement import cases
from rljob_api.planner import plan
from rljob_convert.conformance.answers import result_of

LAYOUTS = sorted(cases.LAYOUTS)


def num_calls(work: Callable[[], object]) -> int:
    """Calls of Python and C functions that ``work`` makes."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plan_takes_calls_in_proportion_to_its_devices(layout: str) -> None:
    small, large = (cases.growth_spec(devices, layout) for devices in (1_024, 10_240))
    plan(small)  # what is made on first use
    assert 5 < num_calls(lambda: plan(large)) / num_calls(lambda: plan(small)) <= 11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conformance_case_takes_calls_in_proportion_to_its_devices(layout: str) -> None:
    small, large = (cases.growth_case(devices, layout) for devices in (640, 6_400))
    assert result_of(small)["ok"]
    assert result_of(large)["ok"]
    assert 5 < num_calls(lambda: result_of(large)) / num_calls(lambda: result_of(small)) <= 11


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("devices", [8, 64, 512])
def test_spec_and_config_of_the_bench_are_the_same_job(devices: int, layout: str) -> None:
    result: Any = result_of(cases.growth_case(devices, layout))
    assert result["ok"]
    for component in plan(cases.growth_spec(devices, layout)).components:
        placed = result["components"][component.name]["placements"]
        assert [(p.rank, p.node_rank, list(p.local_devices), p.local_rank, p.local_world_size) for p in component.processes] == [
            (p["rank"], p["cluster_node_rank"], p["local_hardware_ranks"], p["local_rank"], p["local_world_size"]) for p in placed
        ]


@pytest.mark.parametrize(
    "name", ["range_two_nodes", "all_shared_names", "share_4_per_gpu_one_gpu", "mixed_share_and_span", "ranked_reorders"]
)
def test_recorded_cases_of_the_bench_are_placed_as_rlinf_placed_them(name: str) -> None:
    case = next(case for case in cases.recorded() if case["name"] == name)
    result: Any = result_of(case)
    entries = json.loads(cases.RECORDED.read_text(encoding="utf-8"))["cases"]
    expected = next(entry["expected"] for entry in entries if entry["case"]["name"] == name)
    assert {key: each["placements"] for key, each in result["components"].items()} == {
        key: each["placements"] for key, each in expected["components"].items()
    }


def test_the_largest_plan_of_the_bench_fits_the_limits() -> None:
    spec = cases.growth_spec(100_000, "collocated")
    assert sum(group.nodes * group.devices_per_node for group in spec.node_groups) == 100_000
    assert max(group.nodes for group in spec.node_groups) <= cases.MAX_GROUP_NODES
