"""The jobs that the bench runs: examples/frozen-lake.yaml with an estimator of advantages, and ROLL's file; each with a seed."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import yaml

from bench.lake import converted

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "frozen-lake.yaml"
ROLLS_FILE = "ROLL's file"
ROLLS_STEPS = 60
ALGORITHMS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GiGPO": {"advantage": {"estimator": "GiGPO", "gamma": 0.95}},
    "StepReinforce": {"advantage": {"estimator": "StepReinforce", "gamma": 0.95}, "reward": {"center": "Group", "scale": "Group"}},
}
"""By estimator what takes the place of fields of the example's ``algorithm``; the example has GRPO. The discount is ROLL's default."""
JOBS = (*ALGORITHMS, ROLLS_FILE)


def manifest(job: str, seed: int, model: Path) -> dict[str, Any]:
    """The job of a run."""
    if job == ROLLS_FILE:
        found = converted.manifest(model.resolve(), steps=ROLLS_STEPS)
    else:
        found = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
        found["spec"]["algorithm"] |= ALGORITHMS[job]
        found["spec"]["model"]["path"] = str(model.resolve())
    found["spec"]["seed"] = seed
    return found


def fingerprint(job: str) -> str:
    """Of the job without seed and place of the model: runs with equal ones differ in their seed alone."""
    described = yaml.safe_dump(manifest(job, 0, Path("/model")), sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:12]
