"""Rendering a decision as a status: complete, stable, small."""

from __future__ import annotations

import json

import pytest

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.vocabulary import Reason
from rljob_operator import status
from tests.support.operator_scene import Scene, at, child, failed_log, scene, time_text
from tests.unit.operator.cases import CASES
from tests.unit.operator.cases.expectations import Case


def condition(rendered: dict, type_: str) -> dict:
    return next(c for c in rendered["conditions"] if c["type"] == type_)


def test_a_running_job() -> None:
    built = scene().stored(attempt=1, startTime=time_text(2)).running()
    rendered = built.pod("node-2", group="infer", ready=False).render(60)
    assert {key: value for key, value in rendered.items() if key != "conditions"} == {
        "observedGeneration": 1,
        "attempt": 1,
        "rayJobName": "math-grpo-a1",
        "image": "rljob-runtime:1",
        "rayVersion": "2.60.0",
        "headPod": "head",
        "startTime": time_text(2),
        "nodes": "2/3",
        "nodeGroups": [
            {"name": "train", "desired": 2, "ready": 2, "rankRange": "0-1"},
            {"name": "infer", "desired": 1, "ready": 0, "rankRange": "2"},
        ],
    }
    assert condition(rendered, "Running") == {
        "type": "Running",
        "status": "True",
        "reason": "Running",
        "message": "Attempt 1 is training.",
        "lastTransitionTime": time_text(60),
        "observedGeneration": 1,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_status_is_a_status(case: Case) -> None:
    rendered = case.scene.render(case.seconds)
    RLJobStatus.model_validate_json(json.dumps(rendered))
    assert "progress" not in rendered


def test_transition_times_change_with_the_status_only() -> None:
    first = scene().child(1, "Initializing").written(10)
    first.pods = list(scene().pod("n0", ready=False, unschedulable="no room").pods)
    second = first.render(20)
    assert condition(second, "ClusterReady")["reason"] == "Unschedulable"
    assert {c["lastTransitionTime"] for c in second["conditions"]} == {time_text(10)}
    first.nodes()
    third = first.render(30)
    assert condition(third, "ClusterReady")["lastTransitionTime"] == time_text(30)
    assert condition(third, "Running")["lastTransitionTime"] == time_text(10)


def test_a_failure_is_recorded_with_its_time_and_kept() -> None:
    built = scene().restarts(1).running().pod("head", head=True, phase="Failed", terminated=("ray", "Error", 7)).written(60)
    entry = built.job.status["lastFailure"]
    assert {**entry, "message": ""} == {
        "attempt": 1, "reason": "HeadLost", "message": "", "podName": "head", "exitCode": 7, "time": time_text(60),
    }  # fmt: skip
    assert built.render(65)["lastFailure"] == entry
    built.children = [child(1, "Failed"), child(2, "Running", job_status="RUNNING")]
    assert built.render(900)["lastFailure"] == entry, "attempt 2 runs because of it"
    built.children = [child(2, "Complete", job_status="SUCCEEDED")]
    assert "lastFailure" not in built.render(901)


def test_a_finished_status_changes_by_generation_only() -> None:
    built = scene().stored(progress={"step": 9}).child(1, "Complete", job_status="SUCCEEDED").nodes().written(60)
    rendered = built.render(90)
    assert not status.changed(built.job.status, rendered)
    assert rendered["completionTime"] == time_text(60)
    assert "progress" not in rendered


def test_nodes_are_released_at_the_end_and_between_attempts() -> None:
    assert scene().child(1, "Complete", job_status="SUCCEEDED").nodes().render()["nodes"] == "0/3"
    assert scene().restarts(1).failed(1).child(1, "Failed").nodes().render(102)["nodes"] == "0/3"


def test_what_appears_after_the_end_changes_nothing() -> None:
    built = scene().child(1, "Complete", job_status="SUCCEEDED").written(60)
    built.child(2, "Running").nodes(2)
    assert not status.changed(built.job.status, built.render(90))


def test_nodes_are_released_at_the_active_deadline() -> None:
    built = scene().spec(activeDeadlineSeconds=9).stored(attempt=1, startTime=time_text(0)).running()
    assert built.render(8)["nodes"] == "3/3"
    assert built.render(9)["nodes"] == "0/3"


def test_a_created_attempt_is_reported_at_once() -> None:
    assert (scene().render()["attempt"], scene().render()["rayJobName"]) == (1, "math-grpo-a1")
    second = scene().restarts(1).failed(1).child(1, "Failed").render(110)
    assert (second["attempt"], second["rayJobName"]) == (2, "math-grpo-a2")
    assert "attempt" not in scene().suspended().render()


def test_the_status_of_a_job_that_is_being_deleted_stays() -> None:
    built = scene().running().written().deleting()
    built.children.clear()
    assert not status.changed(built.job.status, built.render())


def test_progress_belongs_to_the_driver() -> None:
    assert not status.changed({"attempt": 1, "progress": {"step": 3}}, {"attempt": 1})
    assert status.changed({"attempt": 1, "progress": {"step": 3}}, {"attempt": 2})


def test_all_problems_of_a_spec_are_listed_or_counted() -> None:
    def problems(number: int) -> Scene:
        errors = [FieldError(path=f"spec.components[{i}]", problem="x" * 90, remedy="y") for i in range(number)]
        return scene().invalid(SpecInvalidError(errors))

    few, many = (condition(problems(n).render(), "Accepted")["message"] for n in (3, 200))
    assert few.count("\n") == 2
    assert len(many) <= 4096
    left_out = 200 - many.count("spec.components")
    assert many.endswith(f"\n... and {left_out} more problems")
    huge = SpecInvalidError([FieldError(path="spec", problem="x" * 9000, remedy="y")] * 2)
    assert condition(scene().invalid(huge).render(), "Accepted")["message"].endswith("...\n... and 1 more problem")


def test_long_texts_in_wide_letters_still_fit() -> None:
    message = failed_log(Reason.MODEL_INVALID, "模型" * 3000)
    built = scene().child(1, "Failed", job_status="FAILED", reason="AppFailed", message=message)
    built.invalid(SpecInvalidError([FieldError(path="spec", problem="错误" * 2500, remedy="y")]))
    rendered = built.render()
    assert len(json.dumps(rendered, ensure_ascii=False).encode()) <= status.MAX_STATUS_BYTES
    assert "模型" in condition(rendered, "Failed")["message"]


def test_the_same_input_gives_the_same_bytes() -> None:
    texts = {json.dumps(scene().running().render()) for _ in range(3)}
    assert len(texts) == 1
    decision = scene().running().decide(60.75)
    assert json.dumps(status.render(scene().running().observed(), decision, at(60.75))) in texts


def test_disruptions_are_counted_and_other_failures_are_not() -> None:
    drained = scene().restarts(1).running().pod("head", head=True, deleting=True).written(60)
    assert (drained.job.status["disruptions"], drained.job.status["lastFailure"]["reason"]) == (1, "Evicted")
    assert "headPod" not in drained.job.status
    drained.children.clear()
    drained.pods.clear()
    second = drained.child(1, "Failed", job_status="FAILED", message=failed_log(Reason.EVICTED)).written(61).written(75)
    assert (second.job.status["attempt"], second.job.status["disruptions"]) == (2, 1)
    second.children.clear()
    lost = second.child(2, "Failed", job_status="FAILED", message=failed_log(Reason.WORKER_LOST)).written(80)
    assert (lost.job.status["disruptions"], lost.job.status["lastFailure"]["attempt"]) == (1, 2)
    assert condition(lost.job.status, "Running")["reason"] == "Restarting", "one restart is left"


def test_a_job_that_ended_for_a_reason_of_a_newer_operator_stays_as_it_is() -> None:
    """After a rollback."""
    ended = scene().restarts(2).child(1, "Failed").failed(1, Reason.SPEC_INVALID).written(200)
    stored = json.loads(json.dumps(ended.job.status).replace('"SpecInvalid"', '"TokenizerInvalid"'))
    assert "completionTime" in stored
    later = ended.stored(**stored)
    decision = later.decide(5000)
    assert decision.create_attempt is None
    assert later.render(5000) == stored
