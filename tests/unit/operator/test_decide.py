"""The decision for each observation of the table; the table leaves no reason out."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator.decide import is_managed
from rljob_operator.model import Decision
from tests.support.operator_scene import at, child, failed_log, scene, summary, time_text
from tests.unit.operator.cases import CASES
from tests.unit.operator.cases.expectations import COMPLETED, Case, app_failed, over

DRIVER_ONLY = {
    Reason.NODES_MISMATCH,
    Reason.DATA_INVALID,
    Reason.CHECKPOINT_FAILED,
    Reason.WEIGHT_SYNC_FAILED,
    Reason.OFFLOAD_FAILED,
    Reason.WORKER_FAILED,
}
"""Reasons that only a driver's termination message carries; the runtime's errors produce them."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decision(case: Case) -> None:
    decision = case.scene.decide(case.seconds)
    found = summary(decision)
    assert {type_: found[type_] for type_ in case.expected} == case.expected
    actions = {
        "create_attempt": decision.create_attempt,
        "set_suspend": dict(decision.set_suspend),
        "delete_children": decision.delete_children,
        "delete_job": decision.delete_job,
    }
    if "next_check" in case.actions:
        actions["next_check"] = decision.next_check
    assert {name: value for name, value in actions.items() if value} == case.actions
    if case.failure is None:
        assert decision.failure is None
    else:
        assert decision.failure is not None
        assert decision.failure.reason is case.failure[0]
        assert case.failure[1] in decision.failure.message
    ended = decision.conditions[ConditionType.FAILED].status is ConditionStatus.TRUE
    assert case.message in decision.conditions[ConditionType.FAILED if ended else ConditionType.RUNNING].message
    assert (decision.completion_time is not None) == (decision.conditions[ConditionType.SUCCEEDED].status is not ConditionStatus.UNKNOWN)


def test_every_reason_is_produced_by_the_table_or_by_the_driver_alone() -> None:
    produced = set()
    for case in CASES:
        decision = case.scene.decide(case.seconds)
        produced |= {value.reason for value in decision.conditions.values()}
    assert produced | DRIVER_ONLY == set(Reason)
    assert produced & DRIVER_ONLY == set(), "these need not be excused any more"


@pytest.mark.parametrize("reason", sorted(DRIVER_ONLY))
def test_the_drivers_own_reasons_pass_through(reason: Reason) -> None:
    assert summary(app_failed(failed_log(reason)).decide()) == over(str(reason))


def test_a_stored_outcome_is_final() -> None:
    done = scene().child(1, "Complete", job_status="SUCCEEDED").written()
    for changed in (done.suspended(), done.invalid(), done.spec(activeDeadlineSeconds=1)):
        decision = changed.decide(9999)
        assert {**summary(decision), "Suspended": ""} == {**COMPLETED, "Suspended": ""}
        assert (decision.set_suspend, decision.delete_children, decision.create_attempt, decision.failure) == ({}, (), None, None)
    done.children.clear()
    assert summary(done.decide(9999)) == COMPLETED


def test_a_failed_job_keeps_no_live_rayjob() -> None:
    ended = scene().spec(startupDeadlineSeconds=25).child(1, "Initializing").written(25)
    assert ended.decide(26).delete_children == ("math-grpo-a1",)
    ended.children = [child(1, "Initializing", deleting=True)]
    assert ended.decide(27).delete_children == ()


def test_a_finished_job_is_deleted_after_its_time_to_live() -> None:
    done = scene().spec(ttlSecondsAfterFinished=30).child(1, "Complete", job_status="SUCCEEDED").written(100)
    before, after = done.decide(129), done.decide(130)
    assert (before.delete_job, before.next_check) == (False, at(130))
    assert after.delete_job
    assert not scene().spec(ttlSecondsAfterFinished=0).running().decide(9999).delete_job


def test_the_backoff_doubles_up_to_ten_minutes() -> None:
    waits_s = []
    for attempt in range(1, 9):
        decision = scene().restarts(98, 10).failed(attempt, seconds=0).child(attempt, "Failed").decide(1)
        assert decision.next_check is not None
        waits_s.append((decision.next_check - at(0)).total_seconds())
    assert waits_s == [10, 20, 40, 80, 160, 320, 600, 600]


def test_a_failure_timed_by_a_clock_that_was_ahead_delays_the_next_attempt_by_the_backoff_only() -> None:
    built = scene().restarts(3, 10).failed(1, seconds=3600).child(1, "Failed")
    first = built.render(100)
    assert first["lastFailure"]["time"] == time_text(100)
    built.stored(lastFailure=first["lastFailure"])
    assert [built.decide(seconds).create_attempt for seconds in (109, 110)] == [None, 2]


def test_the_active_deadline_starts_pauses_and_restarts() -> None:
    assert scene().decide(5).start_time == at(5)
    assert scene().decide(5.9).start_time == at(5), "as it will be read back"
    assert scene().stored(startTime=time_text(5)).running().decide(60).start_time == at(5)
    assert scene().stored(startTime=time_text(5)).suspended().running().decide(60).start_time is None
    assert scene().queued().stored(startTime=time_text(5)).child(1, "Suspended", suspend=True).decide(60).start_time is None
    assert scene().child(1, "Suspended", suspend=True).decide(60).start_time == at(60)
    assert scene().stored(attempt=1).child(1, "Initializing").decide(60).start_time == at(60), "it was held until now"
    assert scene().queued().child(1, "Initializing").decide(60).start_time == at(60), "Kueue may have held it until now"
    assert scene().child(1, "Initializing", created=at(20)).decide(60).start_time == at(20), "the operator died before it wrote the status"
    assert scene().restarts(1).failed(1).child(1, "Failed").decide(200).start_time == at(0), "all attempts share it"


def test_an_active_deadline_that_passed_while_the_operator_was_down_is_enforced_at_once() -> None:
    """The operator died between creating the RayJob and writing the status: its first pass only starts the clock."""
    built = scene().spec(activeDeadlineSeconds=50).child(1, "Running", job_status="RUNNING", created=at(0))
    first = built.decide(60)
    assert (first.start_time, first.next_check) == (at(0), at(60))
    assert summary(built.written(60).decide(60)) == over("ActiveDeadlineExceeded")


def test_a_job_that_is_resumed_at_once_waits_for_the_driver_that_was_suspended() -> None:
    """However old the job is: its head may write a checkpoint for as long as its grace period, also while nobody has deleted it yet."""
    resumed = scene().queued().running().written(60).written(3600).spec(suspend=True).written(3601).spec(suspend=False)
    resumed.children = []
    assert resumed.decide(3603).create_attempt is None
    assert "pod head of the previous driver" in resumed.decide(3603).conditions[ConditionType.RUNNING].message
    waiting = resumed.written(3603)
    assert waiting.written(3610).job.status == waiting.job.status
    waiting.pods = []
    assert waiting.decide(3620).create_attempt == 1


def test_only_another_controllers_job_is_not_managed() -> None:
    assert is_managed(scene().job)
    assert is_managed(scene().spec(managedBy="rljob.dev/operator").job)
    assert not is_managed(scene().spec(managedBy="kueue.x-k8s.io/multikueue").job)


def messages(decision: Decision) -> dict[str, str]:
    return {str(type_): value.message for type_, value in decision.conditions.items()}


def test_cluster_ready_gives_the_reason_of_running_except_for_restarts() -> None:
    conflict = messages(scene().taken("math-grpo-a1").decide())
    assert conflict["ClusterReady"] == conflict["Running"] == conflict["Succeeded"] != ""
    restarting = messages(scene().restarts(1).failed(1).child(1, "Failed").decide(100))
    assert restarting["ClusterReady"] == "", "nodes are not what a restart waits for"
    assert restarting["Running"] == restarting["Succeeded"] != ""


def test_a_head_that_exited_with_0_is_reported_without_a_reason() -> None:
    decision = scene().running().pod("head", head=True, phase="Succeeded").decide()
    assert messages(decision)["Failed"] == "The driver was lost: Pod head terminated."


def test_a_restarted_job_waits_for_the_nodes_of_its_own_attempt() -> None:
    built = scene().restarts(3).failed(1).stored(attempt=2, failure=None).child(2, "Initializing")
    running = built.decide(400).conditions[ConditionType.RUNNING]
    assert running.message == "Attempt 2 is waiting for its nodes."
