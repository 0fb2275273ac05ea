"""What Kueue says of jobs that it holds: when its Workloads are read, and what reaches the status."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rljob_operator.errors import NotFoundError
from rljob_operator.model import ChildView, Key
from rljob_operator.protocol import Kind
from rljob_operator.queue_notes import JOB_UID_LABEL, QueueNotes
from tests.support.operator_scene import at, child, scene
from tests.unit.operator.shell.fake_kube import FakeKube
from tests.unit.operator.shell.world import World, rljob

KEY = Key(namespace="team", name="math")
MISSING = "couldn't assign flavors to pod set train: insufficient unused quota for nvidia.com/gpu in flavor default, 8 more needed"
NO_QUEUE = "LocalQueue  doesn't exist"
PREEMPTED = "Preempted to accommodate a workload (UID: 1) due to prioritization in the ClusterQueue"


def condition(kind: str, status: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": status, "reason": "Any", "message": message}


def workload(kube: FakeKube, *conditions: dict[str, str], uid: str = "a", name: str = "rayjob-math-a1") -> None:
    """Kueue's of a RayJob."""
    metadata = {"namespace": "team", "name": name, "labels": {JOB_UID_LABEL: uid}}
    kube.objects.pop((Kind.WORKLOAD, "team", name), None)
    kube.add({"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": metadata, "status": {"conditions": list(conditions)}})


def held(**more: Any) -> ChildView:
    return child(1, "Suspended", **{"suspend": True, "queue": "team-a", **more})


def note(notes: QueueNotes, seconds: float, view: ChildView, uid: str | None = "a") -> str:
    return noted(notes, seconds, view, uid).queue_note


def noted(notes: QueueNotes, seconds: float, view: ChildView, uid: str | None = "a", *, suspend: bool = False) -> ChildView:
    job = scene().spec(suspend=suspend).job
    (found,) = asyncio.run(notes.noted(replace(job, key=KEY), [view], lambda name: uid, at(seconds)))
    return found


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ([condition("QuotaReserved", "False", MISSING)], MISSING),
        ([condition("QuotaReserved", "False", MISSING), condition("Evicted", "True", PREEMPTED)], MISSING),
        ([condition("QuotaReserved", "False", ""), condition("Evicted", "True", PREEMPTED)], PREEMPTED),
        ([condition("QuotaReserved", "True", "Quota reserved"), condition("Evicted", "False", PREEMPTED)], ""),
        ([], ""),
    ],
)
def test_the_missing_quota_is_said_or_else_the_preemption(conditions: list[dict[str, str]], said: str) -> None:
    kube = FakeKube()
    workload(kube, *conditions)
    workload(kube, condition("QuotaReserved", "False", "of another job"), uid="b", name="another")
    assert note(QueueNotes(kube), 0, held()) == said


@pytest.mark.parametrize("view", [held(suspend=False), held(queue=""), held(deleting=True), held()])
def test_nothing_is_read_of_jobs_that_kueue_does_not_hold(view: ChildView) -> None:
    kube, reads = FakeKube(), []
    kube.fault = lambda verb, kind, name: reads.append(kind)
    uid = None if view == held() else "a"
    assert noted(QueueNotes(kube), 0, view, uid, suspend=not view.queue).queue_note == ""
    assert reads == []


def test_before_a_job_without_a_queue_is_resumed_a_workload_is_looked_for_each_time() -> None:
    kube, reads = FakeKube(), []
    kube.fault = lambda verb, kind, name: reads.append(kind)
    notes, view = QueueNotes(kube), held(queue="")
    assert [noted(notes, seconds, view).has_workload for seconds in (0, 1)] == [False, False]
    workload(kube, condition("QuotaReserved", "False", NO_QUEUE))
    assert (noted(notes, 2, view).has_workload, noted(notes, 121, view).queue_note) == (True, NO_QUEUE)
    assert reads == [Kind.WORKLOAD] * 3


def test_a_cluster_without_kueue_is_nothing_to_log(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    kube.fault = lambda verb, kind, name: NotFoundError("list Workload", 404, "the server could not find the requested resource")
    assert not noted(QueueNotes(kube), 0, held(queue="")).has_workload
    assert caplog.records == []


def test_operator_and_kueue_do_not_fight_over_a_job_without_a_queue() -> None:
    """With manageJobsWithoutQueueName Kueue suspends the RayJob, and again whenever somebody resumes it."""
    world = World()
    world.kube.add(rljob())
    kuberay, suspended = world.kuberay.step, []

    def kueue_and_kuberay() -> bool:
        for name in world.kube.names(Kind.RAYJOB):
            rayjob = world.kube.one(Kind.RAYJOB, name)
            if not rayjob["spec"].get("suspend"):
                world.kube.edit(Kind.RAYJOB, "team", name, {"spec": {"suspend": True}})
                suspended.append(name)
                workload(world.kube, condition("QuotaReserved", "False", NO_QUEUE), uid=rayjob["metadata"]["uid"])
        return kuberay()

    world.kuberay.step = kueue_and_kuberay  # type: ignore[method-assign]
    asyncio.run(world.settle(hours=0.2))
    assert suspended == ["math-a1"], "once, when it was created"
    assert world.condition("Suspended") == ("True", "Queued")
    message = next(c["message"] for c in world.status()["conditions"] if c["type"] == "Suspended")
    assert message == (
        f"Kueue manages jobs without a queue here (manageJobsWithoutQueueName) and holds RayJob math-a1: {NO_QUEUE}. "
        "Create the RLJob again with spec.queue, or run kubectl label rayjob math-a1 kueue.x-k8s.io/queue-name=<a LocalQueue>."
    )


def test_workloads_are_read_every_two_minutes_and_sooner_until_they_say_something() -> None:
    kube, reads = FakeKube(), []
    kube.fault = lambda verb, kind, name: reads.append(kind)
    notes = QueueNotes(kube)
    assert [note(notes, seconds, held()) for seconds in (0, 14, 15)] == ["", "", ""]
    workload(kube, condition("QuotaReserved", "False", MISSING))
    assert [note(notes, seconds, held()) for seconds in (29, 30)] == ["", MISSING]
    workload(kube, condition("QuotaReserved", "False", "something else"))
    assert [note(notes, seconds, held()) for seconds in (149, 150)] == [MISSING, "something else"]
    assert reads == [Kind.WORKLOAD] * 4


def test_workloads_that_cannot_be_read_are_logged_once_and_hide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    workload(kube, condition("QuotaReserved", "False", MISSING))
    notes = QueueNotes(kube)
    assert note(notes, 0, held()) == MISSING
    kube.fault = lambda verb, kind, name: NotFoundError("list Workload", 404, "the server could not find the requested resource")
    assert [note(notes, seconds, held()) for seconds in (120, 240)] == [MISSING, MISSING], "what was known"
    (record,) = caplog.records
    assert record.getMessage().startswith("Workloads of Kueue cannot be read, so no condition says why jobs are queued: list Workload: 404")


def test_the_reason_reaches_the_conditions_of_a_job_and_follows_kueue() -> None:
    world = World()
    world.kube.add(rljob(queue={"name": "team-a"}))

    def message() -> str:
        return next(c["message"] for c in world.status()["conditions"] if c["type"] == "Suspended")

    async def run() -> None:
        await world.settle(hours=0.01)
        assert message().startswith("Waiting for quota in queue team-a, or preempted there: kubectl describe workloads says")
        uid = world.kube.one(Kind.RAYJOB, "math-a1")["metadata"]["uid"]
        for said in (MISSING, PREEMPTED):
            workload(world.kube, condition("QuotaReserved", "False", said), uid=uid)
            await world.settle(hours=0.1)
            assert message() == f"Queued in team-a: {said}."

    asyncio.run(run())
    assert world.condition("Suspended") == ("True", "Queued")


def test_a_job_of_which_kueue_says_nothing_is_soon_left_alone() -> None:
    world, reads = World(), []

    def read(verb: str, kind: Kind, name: str) -> None:
        reads.append(kind)

    world.kube.fault = read
    world.kube.add(rljob(queue={"name": "team-a"}))
    asyncio.run(world.settle())
    assert world.due == {}
    assert 0 < reads.count(Kind.WORKLOAD) <= 9
