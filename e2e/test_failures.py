"""Jobs that cannot succeed: what the status reports, and that nothing is left running."""

from __future__ import annotations

from e2e.jobs import quickstart, two_groups, with_code
from e2e.kubectl import Kubectl
from e2e.volumes import Volume

BROKEN_REWARD = """
import json
raise RuntimeError("the answer key is missing: " + json.dumps({"file": "answers.csv"}))
"""
FOREIGN = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "spec": {
        "managedBy": "kueue.x-k8s.io/multikueue",  # KubeRay ignores it
        "entrypoint": "true",
        "shutdownAfterJobFinishes": True,  # Kueue's webhook wants that of all, as it manages jobs without a queue in some namespaces
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": [{"name": "ray", "image": "none"}]}}}
        },
    },
}
"""A RayJob with another owner; it starts nothing."""

UNSCHEDULABLE = ("Insufficient example.com/virtual-gpu", "node(s) didn't match Pod's node affinity/selector")


def both_causes_are_said(kubectl: Kubectl, job: str) -> bool:
    message = kubectl.condition(job, "ClusterReady")["message"]
    return all(words in message for words in UNSCHEDULABLE)


def waits_for_the_head(kubectl: Kubectl, job: str) -> bool:
    """Whether KubeRay's init container runs in a pod of this job."""
    containers = [c for pod in kubectl.children(job, "pods") for c in pod["status"].get("initContainerStatuses", [])]
    return any("running" in container["state"] for container in containers)


def test_an_impossible_placement_creates_no_child(kubectl: Kubectl):
    name = "impossible"
    job = two_groups(name, steps=5)
    job["spec"]["components"][0]["placement"]["ranks"] = "0-7"
    kubectl.apply(job)
    kubectl.until("it is rejected", lambda: kubectl.condition(name, "Accepted").get("status") == "False", 30, job=name)
    accepted = kubectl.condition(name, "Accepted")
    assert accepted["reason"] == "SpecInvalid"
    assert "spec.components[0].placement.ranks" in accepted["message"]
    for kind in ("rayjobs", "serviceaccounts", "networkpolicies"):
        assert kubectl.children(name, kind) == []


def test_a_missing_image_is_reported_until_the_startup_deadline(kubectl: Kubectl):
    name = "no-image"
    job = two_groups(name, steps=5)
    del job["spec"]["storage"]
    job["spec"] |= {"image": "localhost/there-is-no-such-image:1", "startupDeadlineSeconds": 25}
    kubectl.apply(job)
    kubectl.until("the reason is shown", lambda: kubectl.condition(name, "ClusterReady").get("reason") == "ImageUnavailable", 60, job=name)
    message = kubectl.condition(name, "ClusterReady")["message"]
    assert "localhost/there-is-no-such-image:1" in message
    kubectl.wait(name, "Failed", 90)
    failed = kubectl.condition(name, "Failed")
    assert failed["reason"] == "StartupDeadlineExceeded"
    assert "25 s" in failed["message"]
    assert "there-is-no-such-image" in failed["message"]
    kubectl.until("the pods are gone", lambda: not kubectl.children(name, "pods"), 150, job=name)
    kubectl("patch", "rljob", name, "--type=merge", "-p", '{"spec": {"ttlSecondsAfterFinished": 1}}')
    kubectl.until("the job is deleted after its TTL", lambda: not kubectl.exists("rljob", name), 60, job=name)


def test_an_unschedulable_job_reports_the_message_of_the_scheduler_once_its_name_is_free(kubectl: Kubectl):
    name = "too-large"
    job = two_groups(name, steps=5)
    del job["spec"]["storage"]
    job["spec"]["nodeGroups"][0]["devicesPerNode"] = 64
    job["spec"]["head"] = {"nodeSelector": {"example.com/there-is": "none"}}
    kubectl.apply(FOREIGN | {"metadata": {"name": f"{name}-a1"}}, job)
    kubectl.until("the name is taken", lambda: kubectl.condition(name, "Running").get("reason") == "ChildNameTaken", 30, job=name)
    assert f"RayJob {name}-a1" in kubectl.condition(name, "Running")["message"]
    kubectl("delete", "rayjob", f"{name}-a1")
    kubectl.until("the reason is shown", lambda: kubectl.condition(name, "ClusterReady").get("reason") == "Unschedulable", 90, job=name)
    kubectl.until("that of the head is, too", lambda: both_causes_are_said(kubectl, name), 60, job=name)
    kubectl.until("the other node waits for the head", lambda: waits_for_the_head(kubectl, name), 60, job=name)
    kubectl("delete", "rljob", name)
    kubectl.until("its pods end at once", lambda: not kubectl.children(name, "pods"), 30, job=name)


def test_a_crashing_user_reward_ends_up_in_the_message(kubectl: Kubectl, volume: Volume):
    name = "reward-crash"
    code = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "broken-code"}, "data": {"my_rewards.py": BROKEN_REWARD}}
    job = with_code(quickstart(name, steps=5), "broken-code")
    job["spec"]["rewards"] = [{"name": "answer", "type": "Function", "function": "my_rewards:score"}]
    kubectl.apply(code, job)
    kubectl.wait(name, "Failed", 240)
    failed = kubectl.condition(name, "Failed")
    assert failed["reason"] == "RewardInvalid"
    assert 'RuntimeError: the answer key is missing: {"file": "answers.csv"}' in failed["message"]
    assert kubectl.condition(name, "Succeeded")["status"] == "False"
    assert "answer key is missing" in volume.read(f"{name}/logs/driver-a1.log")
