"""Which problems a job that has started is no longer refused for."""

from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from tests.unit.api.manifests import manifest


def changed(**fields: Any) -> dict[str, Any]:
    document = manifest()
    document["spec"] |= fields
    return document


TOLERATED: dict[str, dict[str, Any]] = {
    "no effect": {"training": {"minLearningRate": 1e-7}},
    "never read": {"report": {"trajectoriesEverySteps": 0, "trajectoriesPerStep": 3}},
    "too little memory": {
        "nodeGroups": [{"name": "local", "devicesPerNode": 2, "deviceResource": "cpu", "deviceMemory": "1Gi"}],
        "model": {"path": "models/tiny", "dtype": "float32", "parameterCount": 10**10},
    },
    "too little memory, and less is needed with a field that can be changed": {
        "nodeGroups": [{"name": "local", "devicesPerNode": 2, "deviceResource": "cpu", "resources": {"memory": "4Gi"}}],
        "model": {"path": "models/tiny", "dtype": "float32", "parameterCount": 10**10},
        "checkpoint": {"asynchronous": False},
    },
}


@pytest.mark.parametrize("fields", TOLERATED.values(), ids=TOLERATED)
def test_rules_and_estimates_do_not_end_it(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalidError) as refused:
        check(changed(**fields))
    assert check(changed(**fields), started=True).tolerated == refused.value.errors


REFUSED: dict[str, dict[str, Any]] = {
    "unknown key": {"misspelled": 1},
    "type": {"seed": "one"},
    "bound": {"rollout": {"temperature": 0}},
    "placement": {"nodeGroups": [{"name": "local", "devicesPerNode": 1, "deviceResource": "cpu"}]},
    "a list of a pod template": {"podTemplate": {"spec": {"volumes": [{"emptyDir": {}}]}}},
    "depends on a field that can be changed": {"training": {"steps": 5, "warmupSteps": 6}},
    "the same, of a job that now trains nothing": {"training": {"steps": 0}},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_or_an_edit_solves_is_still_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SpecInvalidError) as new:
        check(changed(**fields))
    with pytest.raises(SpecInvalidError) as started:
        check(changed(**fields), started=True)
    assert started.value.errors == new.value.errors


def test_a_job_without_problems_has_none_to_tolerate() -> None:
    assert check(manifest(), started=True).tolerated == ()
