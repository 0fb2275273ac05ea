"""Engines of another floating-point type than the trainer's: what they hold, what travels, what both cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_api import memory, planner
from rljob_api.dtypes import engine_dtype, engine_dtypes, sync_dtype
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import QWEN25_7B

PARAMETERS, LAYERS, KV = 7_615_616_512, 28, 512


def job(model: str, *engines: str | None) -> RLJobSpec:
    """A trainer of one type, and an engine of each of the others."""
    document = manifest()
    spec = document["spec"]
    spec["model"]["dtype"] = model
    spec["nodeGroups"] = [{"name": "gpu", "devicesPerNode": 1 + len(engines), "deviceMemory": "80Gi"}]
    trainer, _, *others = spec["components"]
    spec["components"] = [trainer, *others]
    for index, dtype in enumerate(engines):
        engine: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        rollout = {"name": f"infer{index}", "role": "Rollout", "placement": {"ranks": str(index + 1)}, "engine": engine}
        spec["components"].append(rollout)
    return RLJob.model_validate_json(json.dumps(document)).spec


@pytest.mark.parametrize(
    ("model", "engines", "travels"),
    [
        ("float32", [None], "float32"),
        ("bfloat16", [None], "bfloat16"),
        ("bfloat16", ["float16"], "bfloat16"),  # the engine holds what the trainer computes with
        ("bfloat16", ["float32"], "bfloat16"),
        ("float32", ["bfloat16"], "bfloat16"),
        ("float32", ["float16", "float16"], "float16"),
        ("float32", ["float16", "bfloat16"], "float32"),
        ("float32", ["bfloat16", None], "float32"),
    ],
)
def test_weights_travel_in_the_trainers_type_unless_all_engines_have_one_smaller(
    model: str, engines: list[str | None], travels: str
) -> None:
    spec = job(model, *engines)
    assert sync_dtype(spec) == travels
    assert engine_dtypes(spec) == {engine or model for engine in engines}
    assert [engine_dtype(spec, c.engine) for c in spec.components if c.role == "Rollout"] == [engine or model for engine in engines]


def test_weights_cache_and_buckets_are_counted_in_the_types_they_have() -> None:
    def estimated(model: str, engine: str | None) -> dict[tuple[str, str, str], int]:
        spec = job(model, engine)
        plan = planner.plan_or_errors(spec)
        assert isinstance(plan, Plan), plan
        estimate = memory.estimate(spec, plan, memory.shape_from_config(QWEN25_7B))
        (capacity,) = estimate.capacities
        found = {("cache", "", "bytes per token"): capacity.bytes_per_token or 0}
        for pool in estimate.pools:
            for phase in pool.phases:
                found |= {(str(phase.phase), t.component, t.need.name): t.num_bytes for t in phase.terms}
        return found

    sync, both = str(memory.Phase.WEIGHT_SYNC), estimated("bfloat16", None)
    wide, narrow = estimated("bfloat16", "float32"), estimated("float32", "bfloat16")
    assert both[sync, "infer0", "bfloat16 weights"] == 2 * PARAMETERS
    assert wide[sync, "infer0", "float32 weights"] == 4 * PARAMETERS
    assert narrow[sync, "infer0", "bfloat16 weights"] == 2 * PARAMETERS
    assert both["cache", "", "bytes per token"] == 2 * LAYERS * KV * 2
    assert wide["cache", "", "bytes per token"] == 2 * LAYERS * KV * 4
    for estimate in (both, wide, narrow):
        assert estimate[sync, "weight sync", "weights in shared memory"] == 2 * PARAMETERS
        assert estimate[sync, "actor_train", "weight buckets"] == both[sync, "actor_train", "weight buckets"]
