"""The most severe problem of the pods, and its message."""

from __future__ import annotations

import pytest

from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator.policies import startup
from rljob_operator.policies.situation import assess
from tests.support.operator_scene import Scene, at, scene, time_text

PULL = ("ray", "ErrImagePull", "x:1 not found")
ROOM = "Insufficient gpu"


def problem(built: Scene) -> startup.Problem | None:
    return startup.problem(assess(built.observed(), at(60)))


def starting() -> Scene:
    return scene().child(1, "Initializing")


def test_problems_that_do_not_resolve_with_time_come_first() -> None:
    built = starting().pod("a", ready=False, unschedulable=ROOM).pod("b", ready=False, terminated=("ray", "Error", 2))
    assert problem(built) == (Reason.POD_FAILED, "Pod b, container ray terminated: Error, exit code 2")
    built.pod("c", ready=False, waiting=PULL)
    assert problem(built) == (Reason.IMAGE_UNAVAILABLE, "Pod c, container ray: image cannot be pulled: x:1 not found")


def test_pods_with_the_same_problem_are_counted() -> None:
    built = starting().pod("b", ready=False, unschedulable=ROOM).pod("a", ready=False, unschedulable=ROOM)
    assert problem(built) == (Reason.UNSCHEDULABLE, "Pod a: Insufficient gpu (and 1 more)")


def test_a_cause_that_passes_does_not_hide_one_that_stays() -> None:
    built = starting()
    for name, missing in (("a", "Insufficient cpu"), ("b", ROOM), ("c", "Insufficient cpu"), ("d", "untolerated taint")):
        built.pod(name, ready=False, unschedulable=missing)
    listed = "Pod a: Insufficient cpu (and 1 more); Pod b: Insufficient gpu; Pod d: untolerated taint"
    assert problem(built) == (Reason.UNSCHEDULABLE, listed)
    for name in ("e", "f"):
        built.pod(name, ready=False, unschedulable=f"didn't match node selector of {name}s")
    assert problem(built) == (Reason.UNSCHEDULABLE, f"{listed}; and 2 more, for other causes")


def test_nodes_that_take_long_to_create_containers_are_named_and_looked_at_again() -> None:
    built = starting().pod("a").pod("b", ready=False, creating_since=at(30)).pod("c", ready=False, creating_since=at(40))
    early, late = built.decide(60), built.decide(200)
    assert early.next_check == at(150), "when the first has taken long"
    assert early.conditions[ConditionType.CLUSTER_READY].message == "1 of 3 nodes are ready."
    assert late.next_check == at(320)
    said = late.conditions[ConditionType.CLUSTER_READY]
    since = time_text(30)
    assert said.reason is Reason.STARTING
    assert (
        said.message == f"1 of 3 nodes are ready. Pod b (and 1 more): its node has been pulling images or mounting volumes since {since}."
    )
    assert built.decide(1800).failure is not None
    assert str(built.decide(1800).failure.message).endswith(f"mounting volumes since {since}.")


def test_a_warning_of_the_node_is_a_problem_of_its_pod() -> None:
    warning = 'FailedMount: MountVolume.SetUp failed for volume "keys" : secret "hub" not found'
    built = starting().pod("b", ready=False, creating_since=at(0), warning=warning)
    assert problem(built) == (Reason.POD_FAILED, f"Pod b, whose containers its node cannot create: {warning}")


def test_nodes_on_another_cluster_are_ready_when_its_driver_starts() -> None:
    """MultiKueue copies the status of the RayJob; pods and RayCluster stay on the other cluster."""
    begun = scene().child(1, "Initializing", is_elsewhere=True)
    assert startup.cluster_ready(assess(begun.observed(), at(60))).reason is Reason.STARTING
    running = scene().child(1, "Running", job_status="RUNNING", is_elsewhere=True)
    ready = startup.cluster_ready(assess(running.observed(), at(60)))
    assert (ready.status, ready.reason) == ("True", Reason.NODES_READY)
    days = {c["type"]: (c["status"], c["reason"]) for c in running.render(200_000)["conditions"]}
    assert (days["Running"], days["Failed"]) == (("True", "Running"), ("False", "Running")), "no pod is missed"


@pytest.mark.parametrize("fields", [{"ready": True}, {"deleting": True, "ready": False}, {"cluster": "older", "ready": False}])
def test_pods_that_do_not_matter(fields: dict[str, object]) -> None:
    assert problem(starting().pod("a", unschedulable=ROOM, **fields)) is None


def test_another_clusters_failure_does_not_matter() -> None:
    assert problem(starting().cluster("older", "no quota")) is None


def test_ready_nodes_beyond_the_plan_do_not_stand_for_missing_ones() -> None:
    built = starting().pod("a").pod("b").pod("c")
    assert assess(built.observed(), at(60)).num_ready == 2
