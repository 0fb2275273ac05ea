"""A job that trains: real pods, real vLLM, real gradients, observed the way a user does."""

from __future__ import annotations

import json

from e2e.jobs import quickstart
from e2e.kubectl import Kubectl
from e2e.volumes import Volume

TRAINS_S = 420.0
STARTS_S = 600.0
"""While other jobs start on the same cores, on a slow machine."""


def metrics(volume: Volume, job: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in volume.read(f"{job}/metrics.jsonl").splitlines()]


def test_the_quickstart_trains_and_reports_conditions(kubectl: Kubectl, volume: Volume):
    name = "quickstart"
    with kubectl.watching("rlj", f"--field-selector=metadata.name={name}") as watched:
        kubectl.apply(quickstart(name, steps=60))
        kubectl.wait(name, "Accepted", 30)
        kubectl.wait(name, "ClusterReady", STARTS_S)
        kubectl.wait(name, "Running", STARTS_S)
        kubectl.wait(name, "Succeeded", TRAINS_S)
        kubectl.until("the watch shows the end", lambda: "Completed" in watched(), 30)
        rows = watched()
    print(rows)

    header, *lines = rows.splitlines()
    assert header.split() == ["NAME", "STATUS", "STEP", "REWARD", "ATTEMPT", "NODES", "AGE"]
    statuses = [line.split()[1] for line in lines[1:]]  # the first row is older than the first reconcile
    assert [s for i, s in enumerate(statuses) if s not in statuses[:i]] == ["Starting", "Running", "Completed"]
    assert lines[-1].split()[1:3] == ["Completed", "60"]
    while_running = [line.split()[2:] for line in lines if line.split()[1] == "Running"]
    assert any("1/1" in columns for columns in while_running)
    steps_and_rewards = {tuple(columns[:2]) for columns in while_running if columns[2:4] == ["1", "1/1"]}
    assert any(0 < int(step) < 60 and float(reward) > 0 for step, reward in steps_and_rewards), f"no step was visible while it ran: {rows}"

    status = kubectl.get("rljob", name)["status"]
    assert {c["type"]: c["status"] for c in status["conditions"]} == {
        "Accepted": "True", "Suspended": "False", "ClusterReady": "False", "Running": "False", "Succeeded": "True", "Failed": "False",
    }  # fmt: skip
    assert status["progress"]["step"] == 60
    assert float(status["progress"]["reward"]) > 0

    files = volume.files(name)
    assert "model/config.json" in files
    assert any(f.startswith("checkpoints/") and f.endswith("COMPLETE") for f in files), files
    assert {"logs/driver-a1.log", "logs/actor_train-0.log", "logs/actor_infer-0.log", "logs/reward-0.log"} <= set(files)
    assert [m["step"] for m in metrics(volume, name)] == list(range(1, 61))
    kubectl.until("the pods are gone", lambda: not kubectl.children(name, "pods"), 150, job=name)
