"""An agentic job on pods of two node groups: episodes of the frozen lake go between the engine and the environment worker."""

from __future__ import annotations

import json

import pytest

from e2e.jobs import Manifest, example
from e2e.kubectl import Kubectl
from e2e.volumes import Volume

NAME = "frozen-lake"
STEPS = 4
TURNS = 3
TRAINS_S = 600.0


def lake() -> Manifest:
    """examples/frozen-lake.yaml with few short episodes, the image's model, and a node group for each device."""
    job = example("frozen-lake", NAME, steps=STEPS)
    spec = job["spec"]
    spec["nodeGroups"] = [{"name": group, "nodes": 1, "devicesPerNode": 1, "deviceResource": "cpu"} for group in ("train", "infer")]
    spec["components"][0]["placement"] = {"nodeGroups": ["train"], "ranks": "0"}
    spec["components"][1]["placement"] = {"nodeGroups": ["infer"], "ranks": "0"}
    spec["model"]["path"] = "models/tiny"  # it has never seen a lake
    spec["environments"][0] |= {"maxTurns": TURNS}
    spec["environments"][0]["parameters"].pop("grid_lookup")
    spec["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4}
    spec["validation"] |= {"everySteps": STEPS, "maxPrompts": 8}
    spec["report"] = {"trajectoriesEverySteps": 1}
    return job


@pytest.mark.begins(lake())
def test_episodes_are_played_in_pods_and_trained(kubectl: Kubectl, volume: Volume) -> None:
    kubectl.wait(NAME, "Succeeded", TRAINS_S)
    steps = [json.loads(line) for line in volume.read(f"{NAME}/metrics.jsonl").splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert all(1 < step["episode/turns_mean"] <= TURNS for step in steps)
    assert sum(step["episode/errors"] for step in steps) == 0
    episodes = [json.loads(line) for line in volume.read(f"{NAME}/trajectories/step-{STEPS:06d}.jsonl").splitlines()]
    assert all(turn["observation"].strip() and turn["tokens"] for episode in episodes for turn in episode["turns"])
