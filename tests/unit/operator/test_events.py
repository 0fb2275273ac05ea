"""Which transitions emit events, each once."""

from __future__ import annotations

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.vocabulary import Reason
from rljob_operator.events import events
from tests.support.operator_scene import Scene, child, failed_log, scene


def emitted(before: Scene, after: Scene, seconds: float = 60) -> list[tuple[str, str]]:
    after.job = before.job
    found = events(before.job.status, after.render(seconds))
    assert all(event.message for event in found)
    return [("Warning" if event.is_warning else "Normal", event.reason) for event in found]


def test_an_invalid_job_is_reported_what_was_not_checked() -> None:
    error = SpecInvalidError([FieldError(path="spec.seed", problem="is text", remedy="write a number")], "9 more checks wait")
    status = scene().invalid(error).render(60)
    (accepted,) = [condition for condition in status["conditions"] if condition["type"] == "Accepted"]
    assert accepted["message"] == "spec.seed: is text; write a number\n9 more checks wait"


def test_a_life_in_events() -> None:
    new, starting = scene(), scene().child(1, "Initializing")
    assert emitted(new, scene()) == [], "that a new job starts goes without saying"
    started = scene().written()
    assert emitted(started, starting) == []
    running = scene().running()
    assert emitted(started, running) == [("Normal", "Running")]
    ready = scene().child(1, "Initializing").pod("head", head=True).nodes()
    assert emitted(started, ready) == [("Normal", "NodesReady")]
    assert emitted(scene().running().written(), scene().child(1, "Complete", job_status="SUCCEEDED")) == [("Normal", "Completed")]


def test_an_invalid_spec_warns_once() -> None:
    assert emitted(scene(), scene().invalid()) == [("Warning", "SpecInvalid")]
    assert emitted(scene().invalid().written(), scene().invalid()) == []
    assert emitted(scene().invalid().written(), scene()) == [("Normal", "SpecValid"), ("Normal", "Starting")]


def test_a_problem_of_a_pod_warns_once_per_reason() -> None:
    before = scene().child(1, "Initializing").written()
    stuck = scene().child(1, "Initializing").pod("n0", ready=False, unschedulable="no room")
    assert emitted(before, stuck) == [("Warning", "Unschedulable")]
    stuck.job = before.job
    same = scene().child(1, "Initializing").pod("n0", ready=False, unschedulable="no room on 2 nodes")
    assert emitted(stuck.written(), same) == []
    assert emitted(stuck.written(), scene().child(1, "Initializing")) == [], "waiting again emits no event"


def test_a_restart_warns_and_the_next_attempt_is_emitted() -> None:
    before = scene().restarts(1).running().written()
    lost = scene().child(1, "Failed", job_status="FAILED", reason="AppFailed", message=failed_log(Reason.WORKER_LOST))
    assert emitted(before, lost) == [("Warning", "Restarting")]
    lost.job = before.job
    waiting = lost.written()
    assert emitted(waiting, scene().child(1, "Failed"), 100) == [("Normal", "Starting")]


def test_the_end_of_a_failed_job_warns() -> None:
    lost = scene().child(1, "Failed", job_status="FAILED", reason="AppFailed", message=failed_log(Reason.DATA_INVALID, "empty"))
    assert emitted(scene().running().written(), lost) == [("Warning", "DataInvalid")]


def test_suspending_and_resuming_are_emitted() -> None:
    before = scene().suspended().running().written()
    assert emitted(before, scene().child(1, "Suspended", suspend=True)) == [("Normal", "Suspended")]
    held = scene().suspended().child(1, "Suspended", suspend=True).written()
    held.spec(suspend=False)
    assert emitted(held, scene().child(1, "Suspended", suspend=True)) == [("Normal", "NotSuspended"), ("Normal", "Starting")]


def test_a_changed_message_alone_emits_no_event() -> None:
    before = scene().child(1, "Initializing").written()
    after = scene()
    after.children = [child(1, "Initializing")]
    assert emitted(before, after.pod("n0")) == []
