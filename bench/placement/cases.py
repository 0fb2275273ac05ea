"""What both planners are given: recorded cases, random cases, and jobs of any size (case format: docs/placement.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rljob_api.reading import manifest
from rljob_api.v1alpha1.rljob import RLJobSpec

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "data" / "placement_cases.json"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
DEVICES_PER_NODE = 8
MAX_GROUP_NODES = 4096
"""Nodes of one group of a manifest."""
Case = dict[str, Any]


def recorded() -> list[Case]:
    """The recorded cases."""
    return [entry["case"] for entry in json.loads(RECORDED.read_text(encoding="utf-8"))["cases"]]


def _halves(devices: int) -> tuple[str, str, int]:
    half = devices // 2
    return f"0-{half - 1}", f"{half}-{devices - 1}", 1


def _engines(devices: int) -> tuple[str, str, int]:
    half = devices // 2
    size = min(half, DEVICES_PER_NODE)
    return f"0-{half - 1}", f"{half}-{devices - 1}:0-{half // size - 1}", size


def _collocated(devices: int) -> tuple[str, str, int]:
    return f"0-{devices - 1}", f"0-{devices - 1}", 1


LAYOUTS: Mapping[str, Callable[[int], tuple[str, str, int]]] = {"halves": _halves, "engines": _engines, "collocated": _collocated}
"""Rank maps of trainer and rollout, and devices of an engine: a half each, the same with engines of 8 devices, everything shared."""


def growth_case(devices: int, layout: str) -> Case:
    """An RLinf config for trainer and rollout on nodes of 8 devices; ``devices`` is a multiple of 8."""
    trainer, rollout, _ = LAYOUTS[layout](devices)
    return {
        "name": f"{layout}-{devices}",
        "kind": "hybrid",
        "cluster": {"num_nodes": devices // DEVICES_PER_NODE, "accelerators_per_node": DEVICES_PER_NODE},
        "config": {"cluster": {"component_placement": {"actor": trainer, "rollout": rollout}}},
    }


def growth_spec(devices: int, layout: str) -> RLJobSpec:
    """The same job as a manifest: the quickstart with other nodes and placements."""
    trainer, rollout, size = LAYOUTS[layout](devices)
    spec = manifest.to_job(manifest.read(QUICKSTART.read_text(encoding="utf-8"))).model_dump(mode="json", by_alias=True)["spec"]
    num_nodes = devices // DEVICES_PER_NODE
    num_groups = -(-num_nodes // MAX_GROUP_NODES)
    spec["nodeGroups"] = [
        {
            "name": f"g{index}",
            "nodes": num_nodes // num_groups + (index < num_nodes % num_groups),
            "devicesPerNode": DEVICES_PER_NODE,
        }
        for index in range(num_groups)
    ]
    spec["components"] = [
        {"name": "actor", "role": "Trainer", "placement": {"ranks": trainer}},
        {"name": "rollout", "role": "Rollout", "placement": {"ranks": rollout}, "engine": {"tensorParallelSize": size}},
    ]
    return RLJobSpec.model_validate_json(json.dumps(spec))
