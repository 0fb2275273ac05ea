"""Failure messages: what happened, then the tail of the log; never longer than a status can hold."""

from __future__ import annotations

import pytest

from rljob_api.vocabulary import Reason
from rljob_operator import views
from rljob_operator.model import Failure
from rljob_operator.policies import failure
from rljob_operator.policies.situation import assess
from tests.support.operator_scene import Scene, at, failed_log, scene


def found(built: Scene) -> Failure:
    result = failure.find(assess(built.observed(), at(60)))
    assert result is not None
    return result


def ended(message: str) -> Scene:
    return scene().child(1, "Failed", job_status="FAILED", reason="AppFailed", message=views.digest(message))


def test_the_tail_of_the_log_follows_what_happened() -> None:
    log = "Job entrypoint command failed with exit code 2\n" + "\n".join(f"line {i}" for i in range(500))
    result = found(ended(log))
    lines = result.message.splitlines()
    assert lines[0] == "The driver exited with code 2 without reporting an error."
    assert lines[1] == "Job entrypoint command failed with exit code 2"
    assert lines[-1] == "line 499"
    assert len(lines) == 2 + views.MAX_LOG_LINES
    assert (result.reason, result.exit_code, result.pod_name) == (Reason.DRIVER_FAILED, 2, None)


def test_no_message_is_longer_than_a_status_can_hold() -> None:
    for text in (failed_log(Reason.MODEL_INVALID, "x" * 9000), "y" * 20_000):
        assert len(found(ended(text)).message) <= failure.MAX_MESSAGE


def test_pods_that_end_with_their_cluster_are_not_blamed() -> None:
    built = ended(failed_log(Reason.WORKER_LOST)).pod("n0", deleting=True, terminated=("ray", "Error", 143))
    assert (found(built).pod_name, found(built).exit_code) == (None, None)
    built.pod("n1", terminated=("ray", "Error", 9))
    assert (found(built).pod_name, found(built).exit_code) == ("n1", 9)


def test_an_oom_kill_does_not_hide_the_error_of_the_driver() -> None:
    built = ended(failed_log(Reason.REWARD_INVALID)).pod("n0", terminated=("ray", "OOMKilled", 137))
    assert found(built).reason is Reason.REWARD_INVALID


@pytest.mark.parametrize("status", ["Complete", "Failed"])
def test_a_stopped_job_is_stopped_however_kuberay_calls_it(status: str) -> None:
    assert found(scene().child(1, status, job_status="STOPPED")).reason is Reason.STOPPED


def test_a_rayjob_that_kuberay_calls_complete_without_success_has_failed() -> None:
    assert found(scene().child(1, "Complete", job_status="FAILED")).reason is Reason.DRIVER_FAILED


@pytest.mark.parametrize(("message", "expected"), [("broke", "broke."), ("broke.\nlog", "broke."), ("why?", "why?"), ("x" * 999, None)])
def test_a_headline_is_one_sentence(message: str, expected: str | None) -> None:
    headline = failure.headline(message)
    assert len(headline) <= failure.MAX_HEADLINE + 1
    assert expected in (None, headline)


OWN_LIMITS = [
    "Pod ephemeral local storage usage exceeds the total limit of containers 10Gi",
    'Container ray exceeded its local ephemeral storage limit "10Gi"',
    'Usage of EmptyDir volume "scratch" exceeds the limit "5Gi"',
]


@pytest.mark.parametrize("said", OWN_LIMITS)
def test_an_eviction_for_a_limit_of_the_pod_itself_says_so_and_is_no_disruption(said: str) -> None:
    """It would come again with each attempt, and disruptions have nearly no budget and no growing backoff."""
    evicted = {"phase": "Failed", "ready": False, "terminated": ("", "Evicted", -1), "end_message": said}
    head = found(scene().running().pod("head", head=True, **evicted))
    text = f"was evicted for what it wrote: {said}; raise resources.limits.ephemeral-storage"
    assert (head.reason, head.pod_name) == (Reason.HEAD_LOST, "head")
    assert f"The driver was lost: Pod head {text}" in head.message
    # Its stop hook had the time to leave the file by which the driver takes this for a drain.
    node = found(ended(failed_log(Reason.EVICTED, "step 7 was the last")).pod("n0", **evicted))
    assert (node.reason, node.pod_name) == (Reason.WORKER_LOST, "n0")
    assert f"Pod n0 {text}" in node.message
    assert "step 7 was the last" in node.message


def test_a_node_under_pressure_is_a_disruption_that_the_message_explains() -> None:
    low = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi"
    evicted = {"phase": "Failed", "ready": False, "terminated": ("", "Evicted", -1), "end_message": low}
    assert found(scene().running().pod("head", head=True, disruption=f"TerminationByKubelet: {low}", **evicted)).reason is Reason.EVICTED
    node = found(ended(failed_log(Reason.WORKER_LOST)).pod("n0", **evicted))
    assert node.message.startswith("Pod n0 terminated: Evicted: The node was low on resource: memory. Threshold quantity: 100Mi, available")


@pytest.mark.parametrize(("terminated_at", "is_lost"), [(29, False), (30, True), (31, True)])
def test_a_head_is_lost_if_it_terminated_since_the_driver_started(terminated_at: int, is_lost: bool) -> None:
    built = scene().running().pod("head", head=True, terminated=("ray", "Error", 1), terminated_at=at(terminated_at))
    assert (failure.find(assess(built.observed(), at(60))) is not None) is is_lost, "the driver started at 30"
