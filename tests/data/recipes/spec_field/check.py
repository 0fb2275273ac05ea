"""The field of the recipe: from the manifest to the settings of the trainer's worker; schema, bounds, rule, and generated files."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_api.__main__ import main
from rljob_api.errors import SpecInvalidError
from rljob_api.validation import CheckedJob, check
from rljob_runtime.job import launch
from tests.unit.api.manifests import manifest


def checked(training: dict[str, Any]) -> CheckedJob:
    document = manifest()
    document["spec"]["training"] = training
    return check(document)


def refused(training: dict[str, Any], *reported: str) -> None:
    with pytest.raises(SpecInvalidError) as refusal:
        checked(training)
    assert all(text in str(refusal.value) for text in reported), refusal.value


def decay(training: dict[str, Any]) -> float:
    """As the trainer's worker is constructed with it."""
    job = checked(training)
    (worker,) = launch.worker_specs(job.job.spec, job.plan, job.plan.component("actor_train"), None, Path("logs"))
    value: float = worker.kwargs["config"].average_decay
    return value


assert decay({}) == 0.0
assert decay({"averageDecay": 0.75}) == 0.75
refused({"averageDecay": 1.0}, "spec.training.averageDecay")
refused({"averageDecays": 0.5}, "averageDecays", "did you mean", "averageDecay")
refused({"averageDecay": 0.99, "steps": 10}, "spec.training.averageDecay: 0.99", "training.steps (10)", "lower it")

assert main(["generate", "--out", "."]) == 0
crd = Path("crds/rljobs.rljob.dev.yaml").read_text()
assert Path("helm/rljob/crds/rljobs.rljob.dev.yaml").read_text() == crd
(version,) = yaml.load(crd, yaml.CSafeLoader)["spec"]["versions"]
field = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["training"]["properties"]["averageDecay"]
wanted = {
    "description": "Decay of a moving average of the weights; 0 keeps none.",
    "type": "number",
    "default": 0.0,
    "exclusiveMaximum": True,
}
assert wanted.items() <= field.items(), field
assert (field["minimum"], field["maximum"]) == (0.0, 1.0)
assert "averageDecay" in Path("docs/reference/rljob.md").read_text()
