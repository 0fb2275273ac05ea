"""The memory estimate of any planned job: sums, signs, monotony, and that it never raises."""

import json
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rljob_api import memory, planner
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import CONFIGS

QUANTITIES = st.sampled_from([None, "0", "1", "24Gi", "80Gi", "0.5Ti"])
SHAPES = st.one_of(
    st.none(),
    st.integers(1, 10**14).map(memory.shape_from_count),
    st.sampled_from(sorted(CONFIGS)).map(lambda name: memory.shape_from_config(CONFIGS[name])),
)
POLICIES = st.sampled_from(["Auto", "Always", "Never"])


@st.composite
def specs(draw: st.DrawFn) -> RLJobSpec:
    """Jobs with devices that are shared in any way."""
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"] = [
        {
            "name": f"g{index}",
            "nodes": draw(st.integers(1, 3)),
            "devicesPerNode": draw(st.integers(1, 4)),
            "deviceResource": draw(st.sampled_from(["cpu", "nvidia.com/gpu"])),
            "deviceMemory": draw(QUANTITIES),
            "resources": {"memory": draw(QUANTITIES)},
        }
        for index in range(draw(st.integers(1, 2)))
    ]
    spec["components"] = [_component(draw, role, index) for index, role in enumerate(draw(_ROLES))]
    spec["model"] |= {"dtype": draw(st.sampled_from(["float32", "bfloat16"])), "attention": draw(st.sampled_from(["sdpa", "eager"]))}
    if draw(st.booleans()):
        spec["model"]["lora"] = {"rank": draw(st.integers(1, 1024)), "targetModules": draw(st.sampled_from([[], ["q_proj"], ["other"]]))}
    spec["rollout"] = {"maxResponseTokens": draw(st.integers(1, 10_000_000)), "promptsPerStep": draw(st.integers(1, 100))}
    spec["training"] = {
        "microBatchTokens": draw(st.integers(1, 100_000_000)),
        "activationCheckpointing": draw(st.booleans()),
        "tensorParallelSize": draw(st.integers(1, 8)),
    }
    spec["offload"] = {"residency": draw(st.sampled_from(["Resident", "Switching"]))}
    spec["weightSync"] = {"backend": draw(st.sampled_from(["Auto", "ObjectStore", "NCCL", "IPC"]))}
    return RLJob.model_validate_json(json.dumps(document)).spec


_ROLES = st.lists(st.sampled_from(["Trainer", "Rollout", "Reference", "Critic", "Reward"]), min_size=1, max_size=4)


def _component(draw: st.DrawFn, role: str, index: int) -> dict[str, Any]:
    if role == "Reward":
        return {"name": f"c{index}", "role": role, "placement": {"workers": draw(st.integers(1, 5))}}
    first = draw(st.integers(0, 3))
    result: dict[str, Any] = {
        "name": f"c{index}",
        "role": role,
        "placement": {"ranks": draw(st.sampled_from(["all", "0", f"0-{first}"]))},
        "offload": {"optimizer": draw(POLICIES), "weight": draw(POLICIES), "kvCache": draw(POLICIES)},
    }
    if role == "Rollout":
        result["engine"] = {
            "type": draw(st.sampled_from(["VLLM", "SGLang"])),
            "tensorParallelSize": draw(st.integers(1, 2)),
            "pipelineParallelSize": draw(st.integers(1, 2)),
            "memoryFraction": draw(st.floats(0.01, 1)),
            "kvCacheBytes": draw(st.sampled_from([None, 2**20, 2**34])),
        }
    return result


def planned(spec: RLJobSpec) -> Plan:
    plan = planner.plan_or_errors(spec)
    assume(isinstance(plan, Plan))
    assert isinstance(plan, Plan)
    return plan


@given(specs(), SHAPES)
@settings(max_examples=150, deadline=None)
def test_any_job_has_an_estimate_that_adds_up(spec: RLJobSpec, shape: memory.ModelShape | None) -> None:
    plan = planned(spec)
    estimate = memory.estimate(spec, plan, shape)
    for pool in estimate.pools:
        for phase in pool.phases:
            assert all(term.num_bytes > 0 for term in phase.terms)
            assert phase.num_bytes == sum(term.need.num_bytes * term.processes for term in phase.terms) <= pool.peak.num_bytes
    json.dumps(memory.as_document(estimate))
    assert memory.as_text(estimate).endswith("\n")
    over = {p.limit_path for p in estimate.pools if p.limit_bytes is not None and p.peak.num_bytes > p.limit_bytes}
    assert over == {problem.path for problem in memory.problems(estimate) if problem.path.startswith("spec.nodeGroups")}
    assert not over & {warning.path for warning in memory.warnings(estimate)}
    assert memory.problems_of(spec, plan, shape) == memory.problems(memory.estimate(spec, plan, shape or memory.shape_of(spec)))


@given(specs(), SHAPES)
@settings(max_examples=50, deadline=None)
def test_every_device_with_a_model_is_in_one_situation(spec: RLJobSpec, shape: memory.ModelShape | None) -> None:
    plan = planned(spec)
    assume(shape is not None)
    counted = {group.name for group in spec.node_groups if group.device_resource != "cpu" or group.device_memory is not None}
    devices = {
        device
        for component in plan.components
        if component.role != "Reward"
        for process in component.processes
        if plan.nodes[process.node_rank].group in counted
        for device in process.devices
    }
    pools = [pool for pool in memory.estimate(spec, plan, shape).pools if pool.kind is memory.PoolKind.DEVICE]
    assert sum(pool.count for pool in pools) == len(devices)
    assert {pool.first for pool in pools} <= devices


@given(specs(), st.integers(1, 10**13), st.integers(1, 10**13))
@settings(max_examples=60, deadline=None)
def test_more_parameters_never_need_less(spec: RLJobSpec, parameters: int, more: int) -> None:
    plan = planned(spec)
    small, large = (memory.estimate(spec, plan, memory.shape_from_count(count)) for count in (parameters, parameters + more))
    needs = {(pool.kind, pool.first): pool.peak.num_bytes for pool in small.pools}
    assert all(pool.peak.num_bytes >= needs[pool.kind, pool.first] for pool in large.pools)


def two_groups(trainers: int, tensor: int, data: int) -> memory.MemoryEstimate:
    """A trainer on its own group and engines on another; nothing else differs."""
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"] = [
        {"name": "train", "nodes": trainers, "devicesPerNode": 1, "deviceMemory": "80Gi"},
        {"name": "infer", "nodes": data, "devicesPerNode": tensor, "deviceMemory": "80Gi"},
    ]
    spec["components"][0]["placement"] = {"nodeGroups": ["train"], "ranks": "all"}
    spec["components"][1] |= {"placement": {"nodeGroups": ["infer"], "ranks": "all"}, "engine": {"tensorParallelSize": tensor}}
    parsed = RLJob.model_validate_json(json.dumps(document)).spec
    return memory.estimate(parsed, planned(parsed), memory.shape_from_config(CONFIGS["qwen2.5 7B"]))


@given(st.integers(1, 64), st.integers(1, 64))
@settings(max_examples=30, deadline=None)
def test_more_data_parallel_processes_need_no_more_each(few: int, more: int) -> None:
    def peak(trainers: int) -> int:
        return max(p.peak.num_bytes for p in two_groups(trainers, 1, 1).pools if p.kind is memory.PoolKind.DEVICE and p.group == "train")

    assert peak(few + more) <= peak(few)


@given(st.integers(0, 4), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_a_larger_tensor_parallel_engine_has_more_room_for_its_cache(power: int, data: int) -> None:
    narrow, wide = (two_groups(1, 2**exponent, data).capacities[0] for exponent in (power, power + 1))
    if power:  # from one device to two it pays for NCCL's buffers
        assert wide.kv_bytes >= narrow.kv_bytes
    assert narrow.tokens is not None
    assert wide.tokens is not None
    assert wide.tokens >= narrow.tokens
