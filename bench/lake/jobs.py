"""The jobs that the bench runs: examples/frozen-lake.yaml with a seed and an estimator of advantages."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import yaml

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "frozen-lake.yaml"
ADVANTAGES: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "GiGPO": {"advantage": {"estimator": "GiGPO", "gamma": 0.95}},
    "StepReinforce": {"advantage": {"estimator": "StepReinforce", "gamma": 0.95}, "reward": {"center": "Group", "scale": "Group"}},
}
"""By estimator what takes the place of fields of the example's ``algorithm``; the example has GRPO. The discount is ROLL's default."""


def manifest(advantage: str, seed: int, model: Path) -> dict[str, Any]:
    """The job of a run."""
    found: dict[str, Any] = copy.deepcopy(yaml.safe_load(EXAMPLE.read_text()))
    found["spec"] |= {"seed": seed, "algorithm": found["spec"]["algorithm"] | ADVANTAGES[advantage]}
    found["spec"]["model"]["path"] = str(model.resolve())
    return found


def fingerprint(advantage: str) -> str:
    """Of the job without seed and place of the model: runs with equal ones differ in their seed alone."""
    described = yaml.safe_dump(manifest(advantage, 0, Path("/model")), sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:12]
