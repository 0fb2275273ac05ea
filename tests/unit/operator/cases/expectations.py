"""What a row of the tables of observations and expected decisions is, and what rows expect again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.vocabulary import Reason
from tests.support.operator_scene import NAME, Scene, scene

OLD_HEAD = f"{NAME}-a1-c-head-1a2b3"
"""A head of the RayCluster of attempt 1."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One observation."""

    name: str
    scene: Scene
    expected: dict[str, str]
    """Condition type -> "<status> <reason>"; types that are left out are not compared."""
    seconds: float = 60
    actions: dict[str, object] = field(default_factory=dict)
    """Non-empty action fields of the decision."""
    failure: tuple[Reason, str] | None = None
    """Reason of the new failure and a part of its message."""
    message: str = ""
    """A part of the message of Running, or of Failed once that is True."""


def waits(reason: str, cluster: str | None = None, **others: str) -> dict[str, str]:
    """Conditions of an unfinished job that is not training."""
    return {
        "Accepted": "True SpecValid",
        "Suspended": "False NotSuspended",
        "ClusterReady": f"False {reason}" if cluster is None else cluster,
        "Running": f"False {reason}",
        "Succeeded": f"Unknown {reason}",
        "Failed": f"False {reason}",
    } | others


def over(reason: str, **others: str) -> dict[str, str]:
    """Conditions of a job that has failed permanently."""
    conditions = waits(reason) | {"Succeeded": f"False {reason}", "Failed": f"True {reason}"}
    return conditions | others


RUNS = {
    "Accepted": "True SpecValid",
    "Suspended": "False NotSuspended",
    "ClusterReady": "True NodesReady",
    "Running": "True Running",
    "Succeeded": "Unknown Running",
    "Failed": "False Running",
}
COMPLETED = {
    "Accepted": "True SpecValid",
    "Suspended": "False NotSuspended",
    "ClusterReady": "False Completed",
    "Running": "False Completed",
    "Succeeded": "True Completed",
    "Failed": "False Completed",
}
HELD = waits("Suspended", Suspended="True Suspended")
QUEUED = waits("Queued", Suspended="True Queued")
PULL = ("ray", "ImagePullBackOff", "manifest unknown: there-is-no-such-image:1")
OOM = ("ray", "OOMKilled", 137)


def app_failed(message: str, **fields: object) -> Scene:
    """A first attempt whose driver failed, and no restart left."""
    return scene().stored(attempt=1).child(1, "Failed", job_status="FAILED", reason="AppFailed", message=message, **fields)


def resumed(suspended: Scene) -> Scene:
    """The same job after its user resumed it."""
    return suspended.spec(suspend=False)


def without_children(before: Scene) -> Scene:
    """The same job after its RayJob was deleted."""
    before.children.clear()
    before.pods.clear()
    return before
