"""Jobs that train: real pods, real vLLM, real gradients, observed the way a user does."""

from __future__ import annotations

import contextlib
import json
import re

from e2e.installation import NAMESPACE
from e2e.jobs import quickstart, unhurried
from e2e.kubectl import Kubectl
from e2e.reading import KubectlError
from e2e.volumes import Volume

TRAINS_S = 420.0
STARTS_S = 300.0
NODE_LOST_S = 150.0
"""Until Ray knows that a node is gone, and the operator has made another attempt."""
WIDENED = {
    "serviceaccount": ("automountServiceAccountToken", "", True),
    "role": ("rules", "/-", {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}),
    "rolebinding": ("subjects", "/-", {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}),
    "networkpolicy": ("spec", "/ingress/-", {}),
    "poddisruptionbudget": ("spec", "/minAvailable", 0),
}
"""External modifications of the objects that all attempts of a job share: kind -> field, path in it, value."""


def metrics(volume: Volume, job: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in volume.read(f"{job}/metrics.jsonl").splitlines()]


def placed(kubectl: Kubectl, job: str) -> dict[str, dict[str, str]]:
    """Node group of a pod -> workers that log there -> their placement."""
    found: dict[str, dict[str, str]] = {}
    for pod in kubectl.children(job, "pods"):
        labels = pod["metadata"]["labels"]
        if labels["ray.io/node-type"] == "worker":
            lines = re.findall(r"\[(\S+)\] pid \d+ starts \S+ on (.*)", kubectl("logs", pod["metadata"]["name"], "--container=ray"))
            found.setdefault(labels["ray.io/group"], {}).update(lines)
    return found


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


def test_a_lost_worker_is_followed_by_an_attempt_that_resumes(kubectl: Kubectl, volume: Volume):
    name = "worker-lost"
    code, job = unhurried(name, steps=30)
    job["spec"] |= {"failurePolicy": {"maxRestarts": 2, "restartBackoffSeconds": 1}, "refuseEvictions": True}
    kubectl.apply(code, job)
    kubectl.until("the RayJob, which is created last", lambda: kubectl.children(name, "rayjobs"), 60, job=name)
    made = {kind: kubectl.get(kind, f"{name}-rljob") for kind in WIDENED}
    for kind, (field, place, value) in WIDENED.items():
        change = json.dumps([{"op": "add", "path": f"/{field}{place}", "value": value}])
        assert "(no change)" not in kubectl("patch", kind, f"{name}-rljob", "--type=json", "-p", change)
    kubectl.until("ten steps", lambda: kubectl.step(name) >= 10, STARTS_S, job=name)
    assert placed(kubectl, name) == {
        "train": {"actor_train-0": "node 0 (train), Accelerator 0", "reward-0": "node 0 (train)"},
        "infer": {"actor_infer-0": "node 1 (infer), Accelerator 0"},
    }
    (worker,) = [p for p in kubectl.children(name, "pods") if p["metadata"]["labels"]["ray.io/group"] == "train"]
    with contextlib.suppress(KubectlError):  # its own process is among those killed
        kubectl("exec", worker["metadata"]["name"], "--container=ray", "--", "bash", "-c", "kill -9 -1")
    kubectl.until("the second attempt", lambda: kubectl.get("rljob", name)["status"].get("attempt") == 2, NODE_LOST_S, job=name)
    failure = kubectl.get("rljob", name)["status"]["lastFailure"]
    assert failure["reason"] == "WorkerLost"
    assert any(lost in failure["message"] for lost in ("actor_train-0", "reward-0")), "both were in that pod; either may be reported first"
    kubectl.wait(name, "Succeeded", TRAINS_S)

    assert kubectl.get("rljob", name)["status"]["attempt"] == 2
    steps = [m["step"] for m in metrics(volume, name)]
    assert steps == list(range(1, 31)), "every step is trained once in the history that counts"
    resumed = volume.read(f"{name}/logs/driver-a2.log")
    assert "resum" in resumed.lower()
    live = [j["metadata"]["name"] for j in kubectl.children(name, "rayjobs")]
    assert live == [f"{name}-a1", f"{name}-a2"]
    for kind, (field, _, _) in WIDENED.items():
        now = kubectl.get(kind, f"{name}-rljob")
        assert now[field] == made[kind][field], f"the second attempt restores {field} of the {kind}"
