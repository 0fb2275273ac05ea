"""Decisions about restarts and suspension, with and without a queue."""

from __future__ import annotations

from rljob_api.vocabulary import Reason
from tests.support.operator_scene import at, failed_log, scene
from tests.unit.operator.cases.expectations import HELD, OLD_HEAD, QUEUED, RUNS, Case, over, resumed, waits, without_children

INTERRUPTIONS = [
    # --- restarts
    Case(
        name="a failure is recorded before anything else",
        scene=scene().restarts(3).stored(attempt=1, headPod=OLD_HEAD).running(),
        expected=waits("Restarting"),
        failure=(Reason.HEAD_LOST, "driver was lost"),
        actions={"next_check": at(60)},
        message="Attempt 2 of at most 4 starts at 2026-01-31T12:01:10Z once RayJob math-grpo-a1 is gone.",
    ),
    Case(
        name="then its live RayJob is deleted",
        scene=scene().restarts(3).failed(1, seconds=59).running(),
        expected=waits("Restarting"),
        actions={"delete_children": ("math-grpo-a1",)},
    ),
    Case(
        name="its deletion is waited for",
        scene=scene().restarts(3).failed(1).child(1, "Running", deleting=True),
        seconds=500,
        expected=waits("Restarting"),
        message="once RayJob math-grpo-a1 is gone",
    ),
    Case(
        name="then the backoff",
        scene=scene().restarts(3).failed(1).child(1, "Failed"),
        seconds=109,
        expected=waits("Restarting"),
        actions={"next_check": at(110)},
        message="Attempt 1 failed: WorkerLost: it broke. Attempt 2 of at most 4 starts at 2026-01-31T12:01:50Z.",
    ),
    Case(
        name="then the old head pod",
        scene=scene().restarts(3).failed(1).child(1, "Failed").pod("head", head=True, deleting=True, deletion_time=at(130)),
        seconds=120,
        expected=waits("Restarting"),
        actions={"next_check": at(730)},
        message="once pod head of the previous driver is gone, or at 2026-01-31T12:12:10Z at the latest",
    ),
    Case(
        name="a terminated head pod is not waited for",
        scene=scene().restarts(3).failed(1).child(1, "Failed").pod("head", head=True, phase="Failed"),
        seconds=110,
        expected=waits("Starting"),
        actions={"create_attempt": 2},
    ),
    Case(
        name="then the next attempt",
        scene=scene().restarts(3).failed(1).child(1, "Failed"),
        seconds=110,
        expected=waits("Starting"),
        actions={"create_attempt": 2},
    ),
    Case(
        name="a name conflict of the next attempt",
        scene=scene().restarts(3).failed(1).taken("math-grpo-a2"),
        seconds=110,
        expected=waits("ChildNameTaken"),
        actions={"next_check": at(140)},
    ),
    Case(
        name="no next attempt for a spec that became invalid",
        scene=scene().restarts(3).failed(1).invalid(),
        seconds=110,
        expected=waits("SpecInvalid", Accepted="False SpecInvalid"),
    ),
    Case(
        name="no next attempt for a changed spec",
        scene=scene().restarts(3).failed(1).changed("podTemplate"),
        seconds=110,
        expected=waits("SpecChanged", Accepted="False SpecChanged"),
        message="No RayJob is created from a spec that was changed after the job began.",
    ),
    Case(
        name="no next attempt while suspended",
        scene=scene().restarts(3).failed(1).suspended().child(1, "Failed"),
        seconds=500,
        expected=HELD,
        message="Attempt 1 failed: WorkerLost",
    ),
    Case(
        name="a live RayJob of a failed attempt is deleted while suspended too",
        scene=scene().restarts(3).failed(1).suspended().running(),
        expected=waits("Suspended", Suspended="False Suspended"),
        actions={"delete_children": ("math-grpo-a1",)},
    ),
    Case(
        name="the final message counts the restarts",
        scene=scene()
        .restarts(2)
        .failed(2)
        .child(3, "Failed", reason="AppFailed", job_status="FAILED", message=failed_log(Reason.WORKER_LOST)),
        seconds=200,
        expected=over("WorkerLost"),
        failure=(Reason.WORKER_LOST, "it broke"),
        message="it broke After 2 restarts.",
    ),
    Case(
        name="a failure of the spec is not retried",
        scene=scene()
        .restarts(2)
        .failed(1)
        .child(2, "Failed", reason="AppFailed", job_status="FAILED", message=failed_log(Reason.MODEL_INVALID)),
        seconds=200,
        expected=over("ModelInvalid"),
        failure=(Reason.MODEL_INVALID, "it broke"),
        message="After 1 of 2 restarts; ModelInvalid is not retried.",
    ),
    Case(
        name="unless a rule says so",
        scene=scene()
        .restarts(2, rules=(("ModelInvalid", "Restart"), ("ModelInvalid", "Fail")))
        .child(1, "Failed", reason="AppFailed", job_status="FAILED", message=failed_log(Reason.MODEL_INVALID)),
        expected=waits("Restarting"),
        failure=(Reason.MODEL_INVALID, "it broke"),
        actions={"next_check": at(60)},
    ),
    Case(
        name="a rule may end the job",
        scene=scene().restarts(2, rules=(("HeadLost", "Fail"),)).stored(attempt=1, headPod=OLD_HEAD).running(),
        expected=over("HeadLost"),
        failure=(Reason.HEAD_LOST, "lost"),
    ),
    Case(
        name="an orphaned RayJob is deleted before a new one is created",
        scene=scene().restarts(3).failed(2).child(1, "Running").child(2, "Failed"),
        seconds=500,
        expected=waits("Restarting"),
        actions={"delete_children": ("math-grpo-a1",)},
    ),
    # --- suspend
    Case(
        name="a live RayJob is suspended",
        scene=scene().suspended().running(),
        expected=waits("Suspended", Suspended="False Suspended"),
        actions={"set_suspend": {"math-grpo-a1": True}},
        message="RayJob math-grpo-a1 still holds nodes",
    ),
    Case(
        name="it takes its time",
        scene=scene().suspended().child(1, "Suspending", suspend=True).nodes(),
        expected=waits("Suspended", Suspended="False Suspended"),
    ),
    Case(name="then it is suspended", scene=scene().suspended().child(1, "Suspended", suspend=True), expected=HELD),
    Case(
        name="deadlines are paused meanwhile",
        scene=scene().suspended().spec(activeDeadlineSeconds=5, startupDeadlineSeconds=5).child(1, "Suspended", suspend=True),
        seconds=5000,
        expected=HELD,
    ),
    Case(
        name="it resumes",
        scene=scene().child(1, "Suspended", suspend=True),
        expected=waits("Starting"),
        actions={"set_suspend": {"math-grpo-a1": False}, "next_check": at(1860)},
    ),
    Case(
        name="it resumes only once it is suspended",
        scene=scene().child(1, "Suspending", suspend=True),
        expected=waits("Starting"),
        actions={"next_check": at(1860)},
        message="once KubeRay has finished suspending it",
    ),
    Case(
        name="it resumes when the old head pod is gone",
        scene=scene().child(1, "Suspended", suspend=True).pod("head", head=True, deleting=True),
        expected=waits("Starting"),
        actions={"next_check": at(660)},
        message="once pod head",
    ),
    Case(
        name="a suspension that KubeRay does not finish fails at the startup deadline",
        scene=scene().stored(startTime="2026-01-31T12:00:00Z").child(1, "Suspending", suspend=True),
        seconds=1800,
        expected=over("StartupDeadlineExceeded"),
        failure=(Reason.STARTUP_DEADLINE_EXCEEDED, "(1800 s)"),
    ),
    Case(
        name="resumed while the RayJob, which waited in its queue, is being deleted",
        scene=scene().queued().spec(suspend=True).child(1, "Suspended", suspend=True).written(70).spec(suspend=False).gone_soon(),
        expected=waits("Starting", Suspended="False Suspended"),
        message="starts again once RayJob math-grpo-a1 is gone",
    ),
    Case(
        name="and once it is gone",
        scene=scene()
        .queued()
        .spec(suspend=True)
        .child(1, "Suspended", suspend=True)
        .written(70)
        .spec(suspend=False)
        .gone_soon()
        .written(72)
        .gone(),
        expected=waits("Starting"),
        actions={"create_attempt": 1},
    ),
    Case(name="Kueue holds a new RayJob", scene=scene().queued().child(1, "Initializing", suspend=True), expected=QUEUED),
    Case(
        name="Kueue preempts a running one",
        scene=scene().queued().child(1, "Suspending", suspend=True).nodes(),
        expected=waits("Queued", Suspended="False Queued"),
    ),
    Case(name="only Kueue resumes it", scene=scene().queued().child(1, "Suspended", suspend=True), seconds=99999, expected=QUEUED),
    Case(
        name="deadlines are paused in the queue, whatever is stored",
        scene=scene()
        .queued()
        .spec(activeDeadlineSeconds=5, startupDeadlineSeconds=5)
        .stored(attempt=1, startTime="2026-01-31T12:00:00Z")
        .child(1, "Suspending", suspend=True),
        seconds=5000,
        expected=QUEUED,
    ),
    Case(name="an admitted queued job runs", scene=scene().queued().running(), expected=RUNS),
    Case(
        name="the suspension of a queued job is recorded first",
        scene=scene().queued().suspended().running(),
        expected=waits("Suspended", Suspended="False Suspended"),
        actions={"next_check": at(60)},
    ),
    Case(
        name="then its quota is given back",
        scene=scene().queued().suspended().running().written(),
        expected=waits("Suspended", Suspended="False Suspended"),
        actions={"delete_children": ("math-grpo-a1",)},
    ),
    Case(
        name="so does one of a namespace whose jobs all go through Kueue",
        scene=scene().suspended().child(1, "Running", job_status="RUNNING", queue="default").written(),
        expected=waits("Suspended", Suspended="False Suspended"),
        actions={"delete_children": ("math-grpo-a1",)},
    ),
    Case(
        name="a job that is resumed before its suspension has gone further runs on",
        scene=resumed(scene().queued().suspended().running().written()),
        expected=RUNS,
    ),
    Case(
        name="one that is resumed after the deletion starts again, whatever else the status did not see",
        scene=resumed(without_children(scene().queued().suspended().running().written())),
        expected=waits("Starting"),
        actions={"create_attempt": 1},
    ),
    Case(
        name="a RayJob that Kueue's webhook suspended is Kueue's",
        scene=scene().child(1, "Suspended", suspend=True, queue="default"),
        expected=QUEUED,
        message="in queue default, or preempted there: kubectl describe workloads says what is missing, or that there is no such queue.",
    ),
    Case(name="without its RayJob it is held", scene=scene().queued().suspended().stored(attempt=2), expected=HELD),
    Case(
        name="and goes on with the same attempt",
        scene=resumed(scene().queued().suspended().stored(attempt=2).written()),
        expected=waits("Starting"),
        actions={"create_attempt": 2},
    ),
    Case(
        name="once the deleted RayJob is gone",
        scene=resumed(scene().queued().suspended().stored(attempt=2).child(2, "Running", deleting=True).written()),
        expected=waits("Starting", Suspended="False Suspended"),
        message="Attempt 2 starts again once RayJob math-grpo-a2 is gone.",
    ),
    Case(
        name="which takes several passes",
        scene=without_children(
            resumed(scene().queued().suspended().stored(attempt=2).child(2, "Running", deleting=True).written()).written()
        ),
        expected=waits("Starting"),
        actions={"create_attempt": 2},
    ),
    Case(
        name="a webhook that is down",
        scene=scene().unavailable("create RayJob math-grpo-a1: 500 failed calling webhook"),
        expected=waits("ApiUnavailable"),
        actions={"next_check": at(120)},
        message="failed calling webhook",
    ),
]
