"""Builders of manifests as plain data: a valid job, changed by the test."""

import json
from typing import Any

from rljob_api.v1alpha1 import RLJob, RLJobSpec


def manifest() -> dict[str, Any]:
    """The smallest valid job: one trainer and one rollout device on one node, one reward process."""
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "case"},
        "spec": {
            "nodeGroups": [{"name": "local", "devicesPerNode": 2, "deviceResource": "cpu"}],
            "components": [
                {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}},
                {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "1"}},
                {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
            ],
            "model": {"path": "models/tiny", "dtype": "float32"},
            "data": {"train": [{"name": "sums", "type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}}]},
            "rewards": [{"name": "answer", "type": "Task"}],
        },
    }


def spec(groups: list[dict[str, Any]], components: list[dict[str, Any]]) -> RLJobSpec:
    """A spec with these groups and components; only types are checked."""
    document = manifest()
    document["spec"]["nodeGroups"] = groups
    document["spec"]["components"] = components
    return RLJob.model_validate_json(json.dumps(document)).spec
