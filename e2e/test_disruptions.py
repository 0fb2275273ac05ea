"""What disrupts a job while it trains: drains, which cost it no step and no restart, and then a lost worker, which costs a restart."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from e2e.installation import NAMESPACE
from e2e.jobs import unhurried
from e2e.kubectl import Kubectl
from e2e.objects import KubectlError
from e2e.test_training import STARTS_S, metrics
from e2e.volumes import Volume

NAME = "disrupted"
CHECKPOINT_EVERY = 30
"""The first checkpoint that no drain causes is written after both."""
DRAINS_S = 180.0
"""The grace period, and what KubeRay needs to end the rest of the cluster."""
NODE_LOST_S = 150.0
"""Until Ray knows that a node is gone, and the operator has made another attempt."""
WIDENED = {
    "serviceaccount": ("automountServiceAccountToken", "", True),
    "role": ("rules", "/-", {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}),
    "rolebinding": ("subjects", "/-", {"kind": "ServiceAccount", "name": "default", "namespace": NAMESPACE}),
    "networkpolicy": ("spec", "/ingress/-", {}),
}
"""External modifications of the objects that all attempts of a job share: kind -> field, path in it, value."""
BUDGET = {"poddisruptionbudget": ("spec", "/minAvailable", 0)}
"""The same for the budget of a job that refuses evictions: an administrator who drains a node all the same."""


def placed(kubectl: Kubectl, job: str) -> dict[str, dict[str, str]]:
    """Node group of a pod -> workers that log there -> their placement."""
    found: dict[str, dict[str, str]] = {}
    for pod in kubectl.children(job, "pods"):
        labels = pod["metadata"]["labels"]
        if labels["ray.io/node-type"] == "worker":
            lines = re.findall(r"\[(\S+)\] pid \d+ starts \S+ on (.*)", kubectl("logs", pod["metadata"]["name"], "--container=ray"))
            found.setdefault(labels["ray.io/group"], {}).update(lines)
    return found


def trains_beyond(kubectl: Kubectl, step: int) -> None:
    kubectl.until(f"ten steps after step {step}", lambda: kubectl.step(NAME) >= step + 10, STARTS_S, job=NAME)


def modify(kubectl: Kubectl, modifications: dict[str, tuple[str, str, object]]) -> None:
    for kind, (field, place, value) in modifications.items():
        change = json.dumps([{"op": "add", "path": f"/{field}{place}", "value": value}])
        assert "(no change)" not in kubectl("patch", kind, f"{NAME}-rljob", "--type=json", "-p", change)


def evicts(kubectl: Kubectl, pod: str) -> bool:
    """Whether the job's budget lets the pod be evicted."""
    try:
        kubectl.evict(pod)
    except KubectlError as error:
        if "disruption budget" in str(error):
            return False
        raise
    return True


def waits_for_attempt(kubectl: Kubectl, attempt: int, timeout_s: float) -> None:
    wanted = f"--for=jsonpath={{.status.attempt}}={attempt}"
    kubectl("wait", wanted, f"rljob/{NAME}", f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 30)


def test_two_drains_cost_no_step_and_no_restart_and_a_lost_worker_the_only_restart(kubectl: Kubectl, volume: Volume) -> None:
    code, job = unhurried(NAME, checkpoint_every=CHECKPOINT_EVERY)
    job["spec"] |= {"failurePolicy": {"maxRestarts": 1, "restartBackoffSeconds": 1}, "refuseEvictions": True}
    kubectl.apply(code, job)
    kubectl.until("the RayJob, which is created last", lambda: kubectl.children(NAME, "rayjobs"), 60, job=NAME)
    made = {kind: kubectl.get(kind, f"{NAME}-rljob") for kind in WIDENED | BUDGET}
    modify(kubectl, WIDENED)

    trained = 0
    for attempt, group in ((1, "headgroup"), (2, "train")):
        trains_beyond(kubectl, trained)
        pod = kubectl.pod_of(NAME, group, attempt)["metadata"]["name"]
        assert not evicts(kubectl, pod), "the job refuses evictions, and its second attempt restored what the administrator changed"
        modify(kubectl, BUDGET)
        kubectl.until("the changed budget counts", lambda pod=pod: evicts(kubectl, pod), 30, job=NAME)
        waits_for_attempt(kubectl, attempt + 1, DRAINS_S)
        status = kubectl.get("rljob", NAME)["status"]
        assert (status["disruptions"], status["lastFailure"]["reason"]) == (attempt, "Evicted"), status
        trained = len(metrics(volume, NAME))
        complete = [Path(file).parent.name for file in volume.files(f"{NAME}/checkpoints") if file.endswith("/COMPLETE")]
        assert any(name.startswith(f"step-{trained:06d}-") for name in complete), "the step under way was finished and saved"

    saved = max(CHECKPOINT_EVERY, trained)
    kubectl.until("steps after a checkpoint", lambda: kubectl.step(NAME) >= saved + 2, STARTS_S, job=NAME)
    assert placed(kubectl, NAME) == {
        "train": {"actor_train-0": "node 0 (train), Accelerator 0", "reward-0": "node 0 (train)"},
        "infer": {"actor_infer-0": "node 1 (infer), Accelerator 0"},
    }
    with contextlib.suppress(KubectlError):  # its own process is among those killed
        kubectl("exec", kubectl.pod_of(NAME, "train", 3)["metadata"]["name"], "--container=ray", "--", "bash", "-c", "kill -9 -1")
    waits_for_attempt(kubectl, 4, NODE_LOST_S)
    failure = kubectl.get("rljob", NAME)["status"]["lastFailure"]
    assert failure["reason"] == "WorkerLost"
    assert any(lost in failure["message"] for lost in ("actor_train-0", "reward-0")), "both were in that pod; either may be reported first"
    trains_beyond(kubectl, kubectl.step(NAME))

    status = kubectl.get("rljob", NAME)["status"]
    assert (status["attempt"], status["disruptions"]) == (4, 2)
    steps = [m["step"] for m in metrics(volume, NAME)]
    assert steps == list(range(1, len(steps) + 1)), "every step is trained once in the history that counts"
    for attempt in (2, 3, 4):
        assert "resum" in volume.read(f"{NAME}/logs/driver-a{attempt}.log").lower()
    assert [j["metadata"]["name"] for j in kubectl.children(NAME, "rayjobs")][-2:] == [f"{NAME}-a3", f"{NAME}-a4"], "what failed stays"
    for kind, (field, _, _) in (WIDENED | BUDGET).items():
        now = kubectl.get(kind, f"{NAME}-rljob")
        assert now[field] == made[kind][field], f"later attempts restore {field} of the {kind}"
    kubectl("delete", "rljob", NAME)
