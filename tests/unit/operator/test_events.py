"""What people are told, and that they are not told it twice."""

from __future__ import annotations

from rljob_api.vocabulary import Reason
from rljob_operator.events import events
from tests.unit.operator.builders import Scene, child, scene, word


def told(before: Scene, after: Scene, seconds: float = 60) -> list[tuple[str, str]]:
    after.job = before.job
    news = events(before.job.status, after.render(seconds))
    assert all(event.message for event in news)
    return [("Warning" if event.is_warning else "Normal", event.reason) for event in news]


def test_a_life_in_events() -> None:
    new, starting = scene(), scene().child(1, "Initializing")
    assert told(new, scene()) == [("Normal", "Starting")]
    started = scene().written()
    assert told(started, starting) == []
    running = scene().running()
    assert told(started, running) == [("Normal", "NodesReady"), ("Normal", "Running")]
    assert told(scene().running().written(), scene().child(1, "Complete", job_status="SUCCEEDED")) == [("Normal", "Completed")]


def test_an_invalid_spec_warns_once() -> None:
    assert told(scene(), scene().invalid()) == [("Warning", "SpecInvalid")]
    assert told(scene().invalid().written(), scene().invalid()) == []
    assert told(scene().invalid().written(), scene()) == [("Normal", "SpecValid"), ("Normal", "Starting")]


def test_a_problem_of_a_pod_warns_once_per_reason() -> None:
    before = scene().child(1, "Initializing").written()
    stuck = scene().child(1, "Initializing").pod("n0", ready=False, unschedulable="no room")
    assert told(before, stuck) == [("Warning", "Unschedulable")]
    stuck.job = before.job
    same = scene().child(1, "Initializing").pod("n0", ready=False, unschedulable="no room on 2 nodes")
    assert told(stuck.written(), same) == []
    assert told(stuck.written(), scene().child(1, "Initializing")) == [], "waiting again is no news"


def test_a_restart_warns_and_the_next_attempt_is_told() -> None:
    before = scene().restarts(1).running().written()
    lost = scene().child(1, "Failed", job_status="FAILED", reason="AppFailed", message=word(Reason.WORKER_LOST))
    assert told(before, lost) == [("Warning", "Restarting")]
    lost.job = before.job
    waiting = lost.written()
    assert told(waiting, scene().child(1, "Failed"), 100) == [("Normal", "Starting")]


def test_the_end_of_a_failed_job_warns() -> None:
    lost = scene().child(1, "Failed", job_status="FAILED", reason="AppFailed", message=word(Reason.DATA_INVALID, "empty"))
    assert told(scene().running().written(), lost) == [("Warning", "DataInvalid")]


def test_suspending_and_resuming_are_told() -> None:
    before = scene().suspended().running().written()
    assert told(before, scene().child(1, "Suspended", suspend=True)) == [("Normal", "Suspended")]
    held = scene().suspended().child(1, "Suspended", suspend=True).written()
    held.spec(suspend=False)
    assert told(held, scene().child(1, "Suspended", suspend=True)) == [("Normal", "NotSuspended"), ("Normal", "Starting")]


def test_another_message_alone_is_no_news() -> None:
    before = scene().child(1, "Initializing").written()
    after = scene()
    after.children = [child(1, "Initializing")]
    assert told(before, after.pod("n0")) == []
