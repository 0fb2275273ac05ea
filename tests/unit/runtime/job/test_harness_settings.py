"""Every field of an agent program reaches the worker that starts it."""

import json
from pathlib import Path

import pytest

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.environments import Harness
from rljob_api.validation import check
from rljob_runtime.environments.config import HarnessConfig
from rljob_runtime.job.worker_settings import environment_config
from tests.layout.tree import ROOT


def config(spec: RLJobSpec, **fields) -> HarnessConfig:
    environment = spec.environments[0]
    harness = Harness.model_validate_json(json.dumps({"command": ["python"]} | fields))
    found = environment_config(spec, environment.model_copy(update={"harness": harness}), Path("/job")).harness
    assert found is not None
    return found


CHANGES = {
    "command": (["a", "-b"], lambda found: found.command, ("a", "-b")),
    "workingFolder": ("work", lambda found: found.working_folder, Path("/job/work")),
    "env": ([{"name": "A", "value": "1"}], lambda found: found.variables, {"A": "1"}),
    "tasks": ("tasks.jsonl", lambda found: found.tasks, Path("/job/tasks.jsonl")),
    "reward": ("scores:digits", lambda found: found.reward, "scores:digits"),
    "sampling": ("Job", lambda found: found.sampling.replaces, True),
}


@pytest.fixture(scope="module")
def spec() -> RLJobSpec:
    return check((ROOT / "examples" / "agent-program.yaml").read_text()).job.spec


def test_all_fields_are_here() -> None:
    assert set(CHANGES) == {field.alias for field in Harness.model_fields.values()}


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_changes_what_the_worker_does(spec, name) -> None:
    value, read, wanted = CHANGES[name]
    assert read(config(spec, **{name: value})) == wanted != read(config(spec))


def test_the_jobs_sampling_is_what_calls_are_compared_with(spec) -> None:
    rollout = spec.rollout.model_copy(update={"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1})
    found = config(spec.model_copy(update={"rollout": rollout})).sampling
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.7, 0.9, 5, 0.1)
