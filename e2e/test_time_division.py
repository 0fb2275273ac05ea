"""Trainer and engine sharing one device of one pod: training is the same as on two devices, and the device is really switched."""

from __future__ import annotations

import json

import pytest

from e2e.jobs import collocated, quickstart
from e2e.kubectl import Kubectl
from e2e.volumes import Volume

NAME = "collocated"
STEPS = 60
"""The same as the quickstart of test_training.py, whose losses are on the volume if all scenarios run."""
TRAINS_S = 600.0


def metrics(volume: Volume, job: str) -> list[dict[str, float]]:
    """Metrics of the steps that a job has finished; empty if there is no such job."""
    path = f"{job}/metrics.jsonl"
    return [json.loads(line) for line in volume.read(path).splitlines()] if "metrics.jsonl" in volume.files(job) else []


@pytest.fixture
def apart(kubectl: Kubectl, volume: Volume) -> list[dict[str, float]]:
    """Metrics of the quickstart on two devices; run here only if no earlier scenario did."""
    found = metrics(volume, "quickstart")
    if len(found) != STEPS:
        kubectl.apply(quickstart("quickstart-apart", steps=STEPS))
        kubectl.wait("quickstart-apart", "Succeeded", TRAINS_S)
        found = metrics(volume, "quickstart-apart")
    return found


def learned(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    """The metrics that must not depend on the placement."""
    return [{name: value for name, value in step.items() if name.startswith(("train/", "reward/", "response/"))} for step in steps]


@pytest.mark.begins(collocated(NAME, steps=STEPS))
def test_the_collocated_quickstart_switches_and_trains_as_on_two_devices(
    kubectl: Kubectl, volume: Volume, apart: list[dict[str, float]]
) -> None:
    kubectl.wait(NAME, "Succeeded", TRAINS_S)
    assert kubectl.get("rljob", NAME)["status"]["progress"]["step"] == STEPS

    steps = metrics(volume, NAME)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert step["offload/bytes"] > 0
        assert step["time/offload_s"] > 0
        assert step["time/load_s"] > 0
    assert learned(steps) == learned(apart)
    workers = {f"logs/{worker}.log" for worker in ("actor_train-0", "actor_infer-0")}
    places = {volume.read(f"{NAME}/{log}").split("\n", 1)[0].partition(" on ")[2] for log in sorted(workers)}
    assert places == {"node 0 (local), Accelerator 0"}
