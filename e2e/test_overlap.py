"""ROLL's asynchronous RLVR configuration, scaled, on pods of two node groups: the engine generates while the trainer trains."""

from __future__ import annotations

import json

import pytest

from e2e.jobs import Manifest, example
from e2e.kubectl import Kubectl
from e2e.volumes import Volume

NAME = "rlvr-async"
STEPS = 40
TRAINS_S = 600.0


def asynchronous() -> Manifest:
    job = example("rlvr-async", NAME, steps=STEPS)
    job["spec"]["validation"]["everySteps"] = 20
    return job


@pytest.mark.begins(asynchronous())
def test_the_asynchronous_example_overlaps_validates_and_stays_within_its_bound(kubectl: Kubectl, volume: Volume) -> None:
    kubectl.wait(NAME, "Succeeded", TRAINS_S)
    steps = [json.loads(line) for line in volume.read(f"{NAME}/metrics.jsonl").splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert sum(step["staleness/mean"] > 0 for step in steps) > STEPS / 2, "the engine did not run ahead of the trainer"
    assert {step["validation/version"] for step in steps if "validation/version" in step} == {0, 20, STEPS}
    assert sum(step["rollout/groups_dropped"] for step in steps) == 0
    workers = ("actor_train-0", "actor_train-1", "actor_infer-0")
    places = [volume.read(f"{NAME}/logs/{worker}.log").split("\n", 1)[0].partition(" on ")[2] for worker in workers]
    assert ["(train)" in places[0], "(train)" in places[1], "(infer)" in places[2]] == [True] * 3, places
