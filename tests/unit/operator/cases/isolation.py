"""Drivers that may have been cut off: which of them count as lost, and when."""

from __future__ import annotations

from rljob_api.vocabulary import Reason
from tests.support.operator_scene import Scene, at, scene
from tests.unit.operator.cases.expectations import RUNS, Case, over, waits


def cut_off(*, is_node_silent: bool = False) -> Scene:
    """A driver whose head pod has been not ready since second 40; one node has ended, others wait in vain to join."""
    lost = scene().stored(attempt=1, headPod="head").running().nodes(ready=False, phase="Pending")
    lost.pod("node-0", ready=False, phase="Failed")
    return lost.pod("head", head=True, ready=False, unready_since=at(40), is_node_silent=is_node_silent)


ISOLATION = [
    Case(
        name="a busy driver, whose nodes run, is never ended for failing its probe",
        scene=scene().running().pod("head", head=True, ready=False, unready_since=at(0)).nodes(ready=False),
        seconds=100_000,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="a driver that is reached and lost its nodes says so itself",
        scene=scene().running().nodes(ready=False, phase="Pending"),
        seconds=100_000,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="one node that runs, or is being drained, is enough",
        scene=scene()
        .running()
        .pod("head", head=True, ready=False, unready_since=at(0))
        .nodes(ready=False, phase="Failed")
        .pod("node-2", group="infer", ready=False, deleting=True),
        seconds=100_000,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="a control plane that reaches no machine ends nothing: phases stay as they were",
        scene=scene()
        .running()
        .pod("head", head=True, ready=False, unready_since=at(0), is_node_silent=True)
        .nodes(ready=False, unready_since=at(0), is_node_silent=True),
        seconds=100_000,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="a node whose phase is unknown may run",
        scene=cut_off().pod("node-1", ready=False, phase="Unknown"),
        seconds=100_000,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="pods that start are waited for, ready or not: no driver runs yet",
        scene=scene().child(1, "Initializing").pod("head", head=True, ready=False, unready_since=at(0)).nodes(ready=False, phase="Pending"),
        seconds=500,
        expected=waits("Starting"),
    ),
    Case(
        name="so are those of an attempt that resumes, or was admitted by Kueue again",
        scene=scene()
        .queued()
        .child(1, "Waiting")
        .pod("head", head=True, ready=False, unready_since=at(0))
        .nodes(ready=False, phase="Pending"),
        seconds=500,
        expected=waits("Starting"),
    ),
    Case(
        name="nodes that have not been seen may run",
        scene=scene()
        .child(1, "Running", job_status="RUNNING")
        .pod("head", head=True, ready=False, unready_since=at(0))
        .pod("node-0", ready=False, phase="Pending"),
        seconds=100_000,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
    ),
    Case(
        name="nothing follows from nodes of which nothing is known",
        scene=scene()
        .spec(nodeGroups=[])
        .child(1, "Running", job_status="RUNNING")
        .pod("head", head=True, ready=False, unready_since=at(0)),
        seconds=100_000,
        expected={"Running": "True Running"},
    ),
    Case(
        name="a driver that nobody reaches and whose nodes have ended has a minute",
        scene=cut_off(),
        seconds=99,
        expected=RUNS | {"ClusterReady": "False NodesNotReady"},
        actions={"next_check": at(100)},
    ),
    Case(
        name="and counts as lost then",
        scene=cut_off(),
        seconds=100,
        expected=over("HeadLost"),
        failure=(
            Reason.HEAD_LOST,
            "The driver was lost: its pod, head, has not been reached since 2026-01-31T12:00:40Z, and none of its 3 nodes runs any more.",
        ),
    ),
    Case(
        name="unless its node does not answer, which is a disruption",
        scene=cut_off(is_node_silent=True),
        seconds=100,
        expected=waits("Restarting"),
        failure=(Reason.EVICTED, "The node of the driver's pod, head, has not answered since 2026-01-31T12:00:40Z, and none"),
    ),
    Case(
        name="a suspended job has no driver to lose",
        scene=cut_off().suspended(),
        seconds=100,
        expected=waits("Suspended", Suspended="False Suspended"),
        actions={"set_suspend": {"math-grpo-a1": True}},
    ),
    Case(
        name="nor has one that Kueue suspended",
        scene=scene()
        .queued()
        .child(1, "Running", job_status="RUNNING", suspend=True)
        .pod("head", head=True, ready=False, unready_since=at(40))
        .nodes(ready=False, phase="Failed"),
        seconds=1000,
        expected=waits("Queued", Suspended="False Queued"),
    ),
]
