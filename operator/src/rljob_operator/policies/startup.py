"""From the making of a RayJob to its running driver: which nodes are missing, why, and for how long that may go on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta

from rljob_api.v1alpha1.conditions import ConditionStatus
from rljob_api.vocabulary import Reason
from rljob_operator.model import ConditionValue, Failure, PodView
from rljob_operator.policies.situation import Situation

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable"}
)
"""Why a container waits when its image is the problem."""
_TELLING = (Reason.IMAGE_UNAVAILABLE, Reason.POD_FAILED, Reason.UNSCHEDULABLE)
"""The most telling problem first: what waiting does not cure before what it may."""

Problem = tuple[Reason, str]


def cluster_ready(situation: Situation) -> ConditionValue:
    """The condition ClusterReady of a live RayJob that is not held."""
    child, ready, desired = situation.child, situation.num_ready, situation.options.num_nodes
    if ready >= desired or (child is not None and child.deployment_status == "Running"):
        return ConditionValue(status=ConditionStatus.TRUE, reason=Reason.NODES_READY, message=f"All {desired} nodes joined.")
    found = problem(situation)
    if found is None:
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.STARTING, message=_count(situation))
    return ConditionValue(status=ConditionStatus.FALSE, reason=found[0], message=f"{_count(situation)} {found[1]}")


def deadline(situation: Situation) -> datetime | None:
    """When the nodes must be there; None when they are, or when the job is held."""
    child = situation.live_child
    if child is None or situation.is_held or child.deployment_status == "Running":
        return None
    # A resumed RayJob keeps its creation time; then the time of the resumption, which starts the job anew, is the later one.
    return max(child.created, situation.started) + timedelta(seconds=situation.options.startup_deadline_s)


def overdue(situation: Situation) -> Failure | None:
    """The end of an attempt whose nodes were not there in time."""
    until = deadline(situation)
    if until is None or situation.now < until or situation.attempt is None:
        return None
    found = problem(situation)
    message = f"Not ready within startupDeadlineSeconds ({situation.options.startup_deadline_s} s): {_count(situation)}"
    return Failure(
        attempt=situation.attempt,
        reason=Reason.STARTUP_DEADLINE_EXCEEDED,
        message=f"{message} {found[1]}" if found else message,
    )


def problem(situation: Situation) -> Problem | None:
    """The most telling thing that keeps nodes from being ready; of several pods with the same problem the first by name."""
    found = [(reason, text) for pod in situation.pods if not pod.ready and not pod.deleting for reason, text in _pod_problem(pod)]
    name = situation.child.cluster_name if situation.child is not None else ""
    for cluster in situation.observed.clusters:
        if cluster.replica_failure is not None and cluster.name == name:
            found.append((Reason.POD_FAILED, f"KubeRay cannot make the pods of RayCluster {name}: {cluster.replica_failure}"))
    if not found:
        return None
    reason, text = min(found, key=lambda item: _TELLING.index(item[0]))
    others = sum(item[0] is reason for item in found) - 1
    return reason, f"{text} ({others} more like it)" if others else text


def _pod_problem(pod: PodView) -> Iterator[Problem]:
    if pod.waiting is not None and pod.waiting[1] in IMAGE_REASONS:
        container, reason, message = pod.waiting
        yield Reason.IMAGE_UNAVAILABLE, f"Pod {pod.name}, container {container}: {reason_class(reason)}: {message}"
    elif pod.terminated is not None:
        yield Reason.POD_FAILED, ended_text(pod)
    elif pod.waiting is not None:
        container, reason, message = pod.waiting
        yield Reason.POD_FAILED, f"Pod {pod.name}, container {container}: {reason}: {message}"
    elif pod.unschedulable is not None:
        yield Reason.UNSCHEDULABLE, f"Pod {pod.name}: {pod.unschedulable}"


def reason_class(reason: str) -> str:
    """One word for the two reasons that the kubelet alternates between, so that a message does not change every few seconds."""
    return "image cannot be pulled" if reason in ("ErrImagePull", "ImagePullBackOff") else reason


def ended_text(pod: PodView) -> str:
    """How a pod's container ended, for example ``Pod x, container ray ended: OOMKilled, exit code 137``."""
    if pod.terminated is None:
        return f"Pod {pod.name} ended"
    container, reason, code = pod.terminated
    return f"Pod {pod.name}, container {container} ended: {reason}, exit code {code}" if container else f"Pod {pod.name} ended: {reason}"


def count_text(ready: int, desired: int) -> str:
    """How many nodes are there, as a sentence."""
    return f"{ready} of {desired} nodes are ready."


def _count(situation: Situation) -> str:
    return count_text(situation.num_ready, situation.options.num_nodes)
