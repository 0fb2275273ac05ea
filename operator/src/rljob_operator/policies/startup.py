"""From the creation of a RayJob to a running driver: which nodes are missing, why, and for how long that is tolerated."""

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
"""Waiting reasons of a container whose image is the problem."""
_PRIORITY = (Reason.IMAGE_UNAVAILABLE, Reason.POD_FAILED, Reason.UNSCHEDULABLE)
"""Most severe first: problems that do not resolve with time before those that may."""

Problem = tuple[Reason, str]


def cluster_ready(situation: Situation) -> ConditionValue:
    """Condition ClusterReady of a live RayJob that is not held."""
    child, ready, desired = situation.child, situation.num_ready, situation.options.num_nodes
    if ready >= desired or (child is not None and child.deployment_status == "Running"):
        return ConditionValue(status=ConditionStatus.TRUE, reason=Reason.NODES_READY, message=f"All {desired} nodes have joined.")
    found = problem(situation)
    if found is None:
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.STARTING, message=_count(situation))
    return ConditionValue(status=ConditionStatus.FALSE, reason=found[0], message=f"{_count(situation)} {found[1]}")


def deadline(situation: Situation) -> datetime | None:
    """When all nodes must be ready; None if they are, or while the job is held."""
    child = situation.live_child
    if child is None or situation.is_held or child.deployment_status == "Running":
        return None
    # A resumed RayJob keeps its creation time; the resumption, which restarts the clock, is then the later of the two.
    return max(child.created, situation.started) + timedelta(seconds=situation.options.startup_deadline_s)


def overdue(situation: Situation) -> Failure | None:
    """The failure of an attempt whose nodes were not ready in time."""
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
    """The most severe problem that keeps nodes from becoming ready; the first pod by name stands for others with the same problem."""
    found = [(reason, text) for pod in situation.pods if not pod.ready and not pod.deleting for reason, text in _pod_problem(pod)]
    name = situation.child.cluster_name if situation.child is not None else ""
    for cluster in situation.observed.clusters:
        if cluster.replica_failure is not None and cluster.name == name:
            found.append((Reason.POD_FAILED, f"KubeRay cannot create the pods of RayCluster {name}: {cluster.replica_failure}"))
    if not found:
        return None
    reason, text = min(found, key=lambda item: _PRIORITY.index(item[0]))
    others = sum(item[0] is reason for item in found) - 1
    return reason, f"{text} (and {others} more)" if others else text


def _pod_problem(pod: PodView) -> Iterator[Problem]:
    if pod.waiting is not None and pod.waiting[1] in IMAGE_REASONS:
        container, reason, message = pod.waiting
        yield Reason.IMAGE_UNAVAILABLE, f"Pod {pod.name}, container {container}: {reason_class(reason)}: {message}"
    elif pod.terminated is not None:
        yield Reason.POD_FAILED, terminated_text(pod)
    elif pod.waiting is not None:
        container, reason, message = pod.waiting
        yield Reason.POD_FAILED, f"Pod {pod.name}, container {container}: {reason}: {message}"
    elif pod.unschedulable is not None:
        yield Reason.UNSCHEDULABLE, f"Pod {pod.name}: {pod.unschedulable}"


def reason_class(reason: str) -> str:
    """One text for the two reasons that the kubelet alternates between, so that the message does not flap."""
    return "image cannot be pulled" if reason in ("ErrImagePull", "ImagePullBackOff") else reason


def terminated_text(pod: PodView) -> str:
    """How a container of a pod terminated, for example ``Pod x, container ray terminated: OOMKilled, exit code 137``."""
    if pod.terminated is None:
        return f"Pod {pod.name} terminated"
    container, reason, code = pod.terminated
    if not container:
        return f"Pod {pod.name} terminated: {reason}"
    return f"Pod {pod.name}, container {container} terminated: {reason}, exit code {code}"


def count_text(ready: int, desired: int) -> str:
    """Number of ready nodes, as a sentence."""
    return f"{ready} of {desired} nodes are ready."


def _count(situation: Situation) -> str:
    return count_text(situation.num_ready, situation.options.num_nodes)
