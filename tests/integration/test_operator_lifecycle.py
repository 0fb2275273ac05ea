"""Every path of an RLJob through the operator on a real API server; the test plays KubeRay by writing RayJob statuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_api import termination
from rljob_api.vocabulary import Reason
from tests.integration.kube_api import ApiServer
from tests.integration.operator_world.process import OperatorProcess
from tests.integration.operator_world.world import SUCCEEDED, World

LOST = termination.encode(
    termination.DriverFailure(reason=Reason.WORKER_LOST, message="worker actor_train-0 is gone (signal 9)", worker="actor_train-0")
)
BAD_REWARD = termination.encode(
    termination.DriverFailure(reason=Reason.REWARD_INVALID, message="reward answer: ImportError: no module named keys")
)


@pytest.fixture(scope="module")
def operator(api_server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    process = OperatorProcess(api_server.kubeconfig, tmp_path_factory.mktemp("operator") / "operator.log", namespaces="")
    process.start()
    yield process
    assert process.stop() == 0


@pytest.fixture
def world(api_server: ApiServer, namespace: str, operator: OperatorProcess) -> World:
    return World(api_server, namespace)


def failed(line: str = LOST) -> dict[str, str]:
    log = "Job entrypoint command failed with exit code 3, last available logs (truncated to 20,000 chars):\nstep 7\n" + line
    return {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": log}


def test_success_from_manifest_to_completed(world: World):
    world.job("good")
    world.until_condition("good", "Accepted", "True/SpecValid")
    child = world.until_child("good-a1")
    assert world.conditions("good")["Succeeded"] == "Unknown/Starting"
    assert [len(world.list(kind, "good")) for kind in ("serviceaccounts", "roles", "rolebindings", "networkpolicies")] == [1] * 4
    assert child["metadata"]["ownerReferences"][0]["kind"] == "RLJob"

    world.runs("good-a1")
    world.until_condition("good", "Running", "True/Running")
    assert world.conditions("good")["ClusterReady"] == "True/NodesReady"
    assert world.status("good")["nodes"] == "1/1"

    progress = {"status": {"progress": {"step": 7, "totalSteps": 200, "reward": "0.5"}}}
    world.patch("rljob", "good", progress, "--subresource=status", "--field-manager=rljob-runtime")
    world.rayjob_status("good-a1", **SUCCEEDED)
    world.until_condition("good", "Succeeded", "True/Completed")
    status = world.status("good")
    assert status["progress"]["step"] == 7, "the operator leaves the job's progress alone"
    assert status["completionTime"]
    assert status["attempt"] == 1
    owners = {m["manager"] for m in world.get("rljob", "good")["metadata"]["managedFields"]}
    assert {"rljob-operator", "rljob-runtime"} <= owners
    query = ("get", "events", "--field-selector=involvedObject.name=good", "-o", "jsonpath={.items[*].reason}")
    world.until("the event, which follows the status", lambda: "Completed" in world.kubectl(*query).split())
    assert "kopf" not in json.dumps([world.get("rljob", "good"), world.get("rayjob", "good-a1")]), "kopf keeps neither state nor finalizers"


def test_an_invalid_spec_has_no_child_and_says_everything(world: World):
    world.job("bad", nodeGroups=[{"name": "local", "nodes": 1, "devicesPerNode": 1, "deviceResource": "cpu"}])
    world.until_condition("bad", "Accepted", "False/SpecInvalid")
    assert "spec.components[1].placement" in world.message("bad", "Accepted")
    assert world.list("rayjobs,serviceaccounts", "bad") == []
    assert world.conditions("bad")["Succeeded"] == "Unknown/SpecInvalid"


def test_a_change_that_the_api_server_does_not_see_is_named_and_ends_nothing(world: World):
    changed, original = {"spec": {"hostNetwork": True}, "metadata": None}, {"metadata": {"labels": {"a": "b"}}, "spec": None}
    world.job("sly", podTemplate={"metadata": {"labels": {"a": "b"}}}, failurePolicy={"maxRestarts": 1, "restartBackoffSeconds": 1})
    world.runs("sly-a1", "sly1")
    world.until_condition("sly", "Running", "True/Running")
    world.patch("rljob", "sly", {"spec": {"podTemplate": changed, "training": {"steps": 500}}})
    world.until_condition("sly", "Accepted", "False/SpecChanged")
    assert world.message("sly", "Accepted").startswith("spec.podTemplate cannot be changed.")
    assert world.conditions("sly")["Running"] == "True/Running", "the attempt goes on with what it began with"
    world.rayjob_status("sly-a1", **failed())
    world.until_condition("sly", "Running", "False/SpecChanged")
    world.pods_gone("sly1-head", "sly1-w0")
    assert world.get("rayjob", "sly-a2") is None
    world.patch("rljob", "sly", {"spec": {"podTemplate": original}})
    child = world.until_child("sly-a2")
    world.until_condition("sly", "Accepted", "True/SpecValid")  # written after the children
    head = child["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert "steps: 500" in head["metadata"]["annotations"]["rljob.dev/spec"], "training.steps has effect for the next attempt"


def test_a_lost_worker_restarts_until_restarts_are_used_up(world: World):
    world.job("retry", failurePolicy={"maxRestarts": 1, "restartBackoffSeconds": 1})
    world.runs("retry-a1", "r1")
    world.until_condition("retry", "Running", "True/Running")
    world.rayjob_status("retry-a1", **failed())
    world.until_condition("retry", "Running", "False/Restarting")
    assert "actor_train-0 is gone" in world.message("retry", "Running")
    world.pods_gone("r1-head", "r1-w0")
    world.runs("retry-a2", "r2")
    world.until_condition("retry", "Running", "True/Running")
    assert world.status("retry")["attempt"] == 2
    world.rayjob_status("retry-a2", **failed())
    world.until_condition("retry", "Failed", "True/WorkerLost")
    assert world.conditions("retry")["Succeeded"] == "False/WorkerLost"
    assert world.status("retry")["lastFailure"]["attempt"] == 2
    assert world.get("rayjob", "retry-a3") is None


def test_a_failure_of_the_users_code_does_not_restart(world: World):
    world.job("code", failurePolicy={"maxRestarts": 5})
    world.runs("code-a1", "code1")
    world.rayjob_status("code-a1", **failed(BAD_REWARD))
    world.until_condition("code", "Failed", "True/RewardInvalid")
    message = world.message("code", "Failed")
    assert "ImportError: no module named keys" in message
    assert "step 7" in message, "the end of the driver's log is part of the message"


def test_rules_of_the_failure_policy_win(world: World):
    rules = [{"reason": "RewardInvalid", "action": "Restart"}]
    world.job("rules", failurePolicy={"maxRestarts": 1, "restartBackoffSeconds": 1, "rules": rules})
    world.runs("rules-a1", "rules1")
    world.rayjob_status("rules-a1", **failed(BAD_REWARD))
    world.pods_gone("rules1-head", "rules1-w0")
    world.until_child("rules-a2")
    assert world.status("rules")["lastFailure"]["reason"] == "RewardInvalid"


def test_suspended_before_its_start_and_while_running(world: World):
    world.job("pause", suspend=True)
    world.until_condition("pause", "Suspended", "True/Suspended")
    assert world.list("rayjobs", "pause") == []
    world.patch("rljob", "pause", {"spec": {"suspend": False}})
    world.runs("pause-a1", "p1")
    world.until_condition("pause", "Running", "True/Running")

    world.patch("rljob", "pause", {"spec": {"suspend": True}})
    world.until("the RayJob is suspended", lambda: world.get("rayjob", "pause-a1")["spec"].get("suspend") is True)
    world.rayjob_status("pause-a1", jobDeploymentStatus="Suspending")
    world.rayjob_status("pause-a1", jobDeploymentStatus="Suspended", jobStatus="", rayClusterName="")
    world.until_condition("pause", "Suspended", "True/Suspended")
    assert world.conditions("pause")["Running"] == "False/Suspended"

    world.patch("rljob", "pause", {"spec": {"suspend": False}})
    world.until_condition("pause", "Suspended", "False/NotSuspended")
    assert world.get("rayjob", "pause-a1")["spec"]["suspend"] is True, "the old head's pod still exists"
    world.pods_gone("p1-head", "p1-w0")
    world.until("the child is resumed", lambda: world.get("rayjob", "pause-a1")["spec"]["suspend"] is False)
    world.runs("pause-a1", "p2")
    world.until_condition("pause", "Running", "True/Running")
    assert world.status("pause")["attempt"] == 1


def test_startup_deadline_names_what_was_missing(world: World):
    world.job("slow", startupDeadlineSeconds=20)  # longer than a busy machine needs for what comes before it
    world.cluster("slow-a1", "s1")
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "example.com/none:1"'}
    status = {"name": "ray", "image": "example.com/none:1", "imageID": "", "ready": False, "restartCount": 0, "state": {"waiting": waiting}}
    world.pod("s1-head", "slow-a1", "s1", "headgroup", phase="Pending", ready=False, containerStatuses=[status])
    world.until_condition("slow", "ClusterReady", "False/ImageUnavailable")
    assert "example.com/none:1" in world.message("slow", "ClusterReady")
    world.until_condition("slow", "Failed", "True/StartupDeadlineExceeded")
    assert "example.com/none:1" in world.message("slow", "Failed")
    world.until("the child is deleted", lambda: world.get("rayjob", "slow-a1") is None)
    assert world.conditions("slow")["Failed"] == "True/StartupDeadlineExceeded"


def test_active_deadline_ends_the_job_whatever_restarts_are_left(world: World):
    world.job("long", activeDeadlineSeconds=3600, failurePolicy={"maxRestarts": 5})
    world.runs("long-a1", "l1")
    world.until_condition("long", "Running", "True/Running")
    world.patch("rljob", "long", {"spec": {"activeDeadlineSeconds": 1}})
    world.until_condition("long", "Failed", "True/ActiveDeadlineExceeded")
    world.until("the child is deleted", lambda: world.get("rayjob", "long-a1") is None)
    assert world.get("rayjob", "long-a2") is None, "no restart although five are left"


def test_a_stopped_ray_job_is_a_failure(world: World):
    world.job("stopped")
    world.runs("stopped-a1", "st1")
    world.rayjob_status("stopped-a1", jobDeploymentStatus="Complete", jobStatus="STOPPED")
    world.until_condition("stopped", "Failed", "True/Stopped")
    assert world.conditions("stopped")["Succeeded"] == "False/Stopped"


def test_what_kuberay_rejects_is_not_accepted(world: World):
    world.job("refused")
    world.until_child("refused-a1")
    world.rayjob_status("refused-a1", jobDeploymentStatus="ValidationFailed", reason="ValidationFailed", message="rayStartParams: bad")
    world.until_condition("refused", "Accepted", "False/ChildRejected")
    assert "rayStartParams: bad" in world.message("refused", "Accepted")


def test_a_deleted_child_counts_as_a_failed_attempt(world: World):
    world.job("orphan", failurePolicy={"maxRestarts": 1, "restartBackoffSeconds": 1})
    world.runs("orphan-a1", "o1")
    world.until_condition("orphan", "Running", "True/Running")
    world.kubectl("delete", "rayjob", "orphan-a1", "--wait=false")
    world.pods_gone("o1-head", "o1-w0")
    world.until_child("orphan-a2")
    assert world.status("orphan")["lastFailure"]["reason"] == "ChildDeleted"


def test_a_foreign_rayjob_in_the_place_of_the_child(world: World):
    spec = {"entrypoint": "true", "rayClusterSpec": {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": {"containers": []}}}}}
    world.apply({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "taken-a1"}, "spec": spec})
    uid = world.get("rayjob", "taken-a1")["metadata"]["uid"]
    world.job("taken")
    world.until_condition("taken", "ClusterReady", "False/ChildNameTaken")
    assert "taken-a1" in world.message("taken", "ClusterReady")
    assert world.get("rayjob", "taken-a1")["metadata"]["uid"] == uid


def test_a_queued_job_waits_suspended_until_the_queue_admits_it(world: World):
    world.job("queued", queue={"name": "team", "priorityClass": "high"})
    child = world.until_child("queued-a1")
    assert child["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert child["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
    assert child["spec"]["suspend"] is True
    world.rayjob_status("queued-a1", jobDeploymentStatus="Suspended")
    world.until_condition("queued", "Suspended", "True/Queued")
    world.patch("rayjob", "queued-a1", {"spec": {"suspend": False}})
    world.runs("queued-a1", "q1")
    world.until_condition("queued", "Running", "True/Running")


def test_finished_jobs_are_deleted_when_their_time_to_live_is_over(world: World):
    world.job("brief", ttlSecondsAfterFinished=1)
    world.runs("brief-a1", "b1")
    world.rayjob_status("brief-a1", **SUCCEEDED)
    world.until("the RLJob is deleted", lambda: world.get("rljob", "brief") is None)
    kinds = "rayjobs,serviceaccounts,roles,rolebindings,networkpolicies"
    world.until("the garbage collector removed its children", lambda: world.list(kinds, "brief") == [], 60)
    assert world.get("rljob", "brief") is None, "nobody made it again"


def test_jobs_of_other_managers_are_left_alone(world: World):
    world.job("other", managedBy="kueue.x-k8s.io/multikueue")
    world.job("mine")
    world.until_child("mine-a1")
    assert world.status("other") == {}


def test_nothing_is_written_while_nothing_changes(world: World):
    world.job("quiet")
    world.runs("quiet-a1", "qu1")
    world.until_condition("quiet", "Running", "True/Running")
    before = world.get("rljob", "quiet")["metadata"]["resourceVersion"]
    for step in range(1, 6):
        world.rayjob_status("quiet-a1", dashboardURL=f"head-{step}:8265")
    world.job("later")
    world.until_child("later-a1")
    assert world.get("rljob", "quiet")["metadata"]["resourceVersion"] == before


def test_the_operator_serves_its_metrics(world: World, operator: OperatorProcess, tmp_path: Path):
    world.job("counted")
    world.until_child("counted-a1")
    text = operator.metrics()
    assert "rljob_operator_reconcile_seconds" in text
