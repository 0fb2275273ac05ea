"""Views of raw objects as the API server returns them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from rljob_api import termination
from rljob_api.vocabulary import Reason
from rljob_operator import views
from tests.support.operator_scene import failed_log

CREATED = "2026-01-31T12:00:00Z"
NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def pod(status: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    labels = {
        "ray.io/cluster": "j-a2-abcde",
        "ray.io/group": "train",
        "ray.io/node-type": "worker",
        "rljob.dev/job": "j",
        "rljob.dev/attempt": "2",
    }
    return {"metadata": {"name": "p", "labels": labels, "creationTimestamp": CREATED} | metadata, "status": status}


def container(name: str = "ray", **states: Any) -> dict[str, Any]:
    return {"name": name, **states}


def test_a_job() -> None:
    view = views.job_view(
        {
            "metadata": {"name": "j", "namespace": "team", "uid": "u", "generation": 3, "creationTimestamp": CREATED},
            "spec": {"suspend": True},
            "status": {"attempt": 1},
        }
    )
    assert (view.key.namespace, view.key.name, view.uid, view.generation, view.created, view.deleting) == ("team", "j", "u", 3, NOON, False)
    assert (view.spec, view.status) == ({"suspend": True}, {"attempt": 1})


def test_a_new_rayjob_has_no_status() -> None:
    owners = [{"uid": "other"}, {"uid": "u", "controller": True}]
    view = views.child_view({"metadata": {"name": "j-a2", "labels": {"rljob.dev/attempt": "2"}, "ownerReferences": owners}, "spec": {}})
    assert (view.name, view.attempt, view.owner_uid, view.suspend, view.deployment_status, view.message) == ("j-a2", 2, "u", False, "", "")
    assert view.job_started is None


def test_a_running_rayjob() -> None:
    status = {
        "jobDeploymentStatus": "Running",
        "jobStatus": "RUNNING",
        "rayClusterName": "j-a1-x",
        "rayJobInfo": {"startTime": CREATED},
        "message": "Job is currently running.",
    }
    view = views.child_view({"metadata": {"name": "j-a1", "deletionTimestamp": CREATED}, "spec": {"suspend": True}, "status": status})
    assert (view.deployment_status, view.job_status, view.cluster_name, view.job_started) == ("Running", "RUNNING", "j-a1-x", NOON)
    assert (view.suspend, view.deleting, view.attempt, view.message) == (True, True, 0, "Job is currently running.")


@pytest.mark.parametrize(("status", "expected"), [("True", "no quota"), ("False", None)])
def test_a_cluster(status: str, expected: str | None) -> None:
    conditions = [{"type": "HeadPodReady", "status": "True"}, {"type": "ReplicaFailure", "status": status, "message": "no quota"}]
    assert views.cluster_view({"metadata": {"name": "c"}, "status": {"conditions": conditions}}).replica_failure == expected


def test_a_ready_pod() -> None:
    view = views.pod_view(pod({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}))
    assert (view.cluster, view.group, view.is_head, view.attempt, view.created) == ("j-a2-abcde", "train", False, 2, NOON)
    assert (view.phase, view.ready, view.unschedulable, view.waiting, view.terminated) == ("Running", True, None, None, None)


@pytest.mark.parametrize(
    ("condition", "since", "is_node_silent"),
    [
        ({"status": "True", "lastTransitionTime": CREATED}, None, False),
        ({"status": "False", "lastTransitionTime": CREATED, "reason": "ContainersNotReady"}, NOON, False),
        ({"status": "False", "lastTransitionTime": CREATED}, NOON, True),  # by the node controller, which changes the status alone
    ],
)
def test_since_when_a_pod_is_not_ready_and_who_says_so(condition: dict[str, str], since: datetime | None, is_node_silent: bool) -> None:
    view = views.pod_view(pod({"phase": "Running", "conditions": [{"type": "Ready", **condition}]}))
    assert (view.unready_since, view.is_node_silent) == (since, is_node_silent)


def test_an_unschedulable_pod() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available"}
    assert views.pod_view(pod({"phase": "Pending", "conditions": [condition]})).unschedulable == "0/1 nodes are available"


def test_a_pod_that_is_being_deleted() -> None:
    view = views.pod_view(pod({}, deletionTimestamp="2026-01-31T12:00:30Z"))
    assert view.deleting
    assert view.deletion_time == datetime(2026, 1, 31, 12, 0, 30, tzinfo=UTC)


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_normal_startup_is_not_waiting(reason: str) -> None:
    assert views.pod_view(pod({"containerStatuses": [container(state={"waiting": {"reason": reason}})]})).waiting is None


BOUND = {"type": "PodScheduled", "status": "True", "lastTransitionTime": CREATED}
CREATING = [container(state={"waiting": {"reason": "ContainerCreating"}})]


@pytest.mark.parametrize(
    ("status", "since"),
    [
        ({"conditions": [BOUND], "containerStatuses": CREATING}, NOON),
        ({"conditions": [BOUND]}, NOON),  # the kubelet has not looked at it yet
        ({"containerStatuses": CREATING}, None),
        ({"conditions": [BOUND], "containerStatuses": CREATING, "phase": "Running"}, None),
        ({"conditions": [BOUND], "containerStatuses": [container(state={"waiting": {"reason": "ErrImagePull"}})]}, None),
        ({"conditions": [BOUND], "initContainerStatuses": [container(state={"running": {}})], "containerStatuses": CREATING}, None),
        ({"conditions": [BOUND], "initContainerStatuses": [container(state={"terminated": {}})], "containerStatuses": CREATING}, None),
    ],
)
def test_since_when_a_pods_containers_are_being_created(status: dict[str, Any], since: datetime | None) -> None:
    assert views.pod_view(pod({"phase": "Pending", **status})).creating_since == since


def test_both_texts_of_a_failing_pull_are_one() -> None:
    error = 'failed to pull "x:1": not found'
    waits = [
        {"reason": "ErrImagePull", "message": error},
        {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "x:1": ErrImagePull: {error}'},
    ]
    found = [views.pod_view(pod({"containerStatuses": [container(state={"waiting": w})]})).waiting for w in waits]
    assert [w and w[2] for w in found] == [error, error]


def test_init_containers_are_looked_at_first() -> None:
    init = [container("wait-gcs-ready", state={"waiting": {"reason": "CrashLoopBackOff"}})]
    view = views.pod_view(pod({"initContainerStatuses": init, "containerStatuses": [container(state={"waiting": {"reason": "X"}})]}))
    assert view.waiting == ("wait-gcs-ready", "CrashLoopBackOff", "")


def test_an_oom_kill_is_most_significant() -> None:
    first = container("sidecar", state={"terminated": {"reason": "Error", "exitCode": 1}})
    second = container(lastState={"terminated": {"reason": "OOMKilled", "exitCode": 137, "finishedAt": CREATED}})
    view = views.pod_view(pod({"containerStatuses": [first, second]}))
    assert (view.terminated, view.terminated_at) == (("ray", "OOMKilled", 137), NOON)


def test_a_container_that_exited_with_0_did_not_fail() -> None:
    view = views.pod_view(pod({"phase": "Succeeded", "containerStatuses": [container(state={"terminated": {"exitCode": 0}})]}))
    assert view.terminated is None


def test_an_evicted_pod_has_no_containers() -> None:
    view = views.pod_view(pod({"phase": "Failed", "reason": "Evicted", "message": 'Usage of EmptyDir volume "a" exceeds the limit. '}))
    assert (view.terminated, view.end_message) == (("", "Evicted", -1), 'Usage of EmptyDir volume "a" exceeds the limit')
    assert views.pod_view(pod({"phase": "Pending", "message": "waiting"})).end_message == ""


def test_a_short_log_is_kept_as_it_is() -> None:
    assert views.digest("Job is currently running.") == "Job is currently running."
    assert views.digest("") == ""


def test_a_long_log_keeps_its_first_line_its_tail_and_the_termination_message() -> None:
    log = "exit code 1\n" + "\n".join(f"line {i}" for i in range(1000)) + "\n" + failed_log(Reason.DATA_INVALID, "x" * 9000)
    found = views.digest(log)
    assert found.startswith("exit code 1\nline ")
    last = termination.decode(found)
    assert last is not None
    assert (last.reason, len(last.message)) == (Reason.DATA_INVALID, views.MAX_TERMINATION_MESSAGE)
    assert len(found) < 6000
    assert len(found.splitlines()) <= views.MAX_LOG_LINES + 2


def test_colors_and_control_characters_are_removed() -> None:
    assert views.clean("\x1b[31mred\x1b[0m\tand\x00 done\n", 100) == "red  and  done"
    assert views.digest("\x1b[36m(actor)\x1b[0m broke") == "(actor)  broke"
