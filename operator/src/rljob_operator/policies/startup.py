"""From the creation of a RayJob to a submitted driver: which nodes are missing, why, and for how long that is tolerated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from rljob_api.v1alpha1.conditions import ConditionStatus
from rljob_api.vocabulary import Reason
from rljob_operator import times
from rljob_operator.model import ChildView, ConditionValue, Failure, PodView
from rljob_operator.policies.situation import Situation

IMAGE_REASONS = frozenset(
    {"ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable"}
)
"""Waiting reasons of a container whose image is the problem."""
MACHINE_WAIT = timedelta(seconds=60)
"""A pod that was bound sooner after its creation did not wait for a machine. KubeRay makes another pod at once where one ended during the
start, for its pods are never restarted: counted from each of them, the deadline would never come."""
CREATION_WAIT = timedelta(seconds=120)
"""How long a node may take to create the containers of a pod before the condition says so and the node's warnings are read."""
CREATION_CHECK = timedelta(seconds=120)
"""How often they are read."""
SUBMISSION_REMEDY = (
    "Its log says why: mostly a network policy or a service mesh between KubeRay and port 8265 of the head pod, or a dashboard that hangs."
)
MAX_CAUSES = 3
"""That a message lists: a pod that waits for a core must not hide another one whose machine type does not exist."""
_PRIORITY = (Reason.IMAGE_UNAVAILABLE, Reason.POD_FAILED, Reason.UNSCHEDULABLE)
"""Most severe first: problems that do not resolve with time before those that may."""

Problem = tuple[Reason, str]


def cluster_ready(situation: Situation) -> ConditionValue:
    """Condition ClusterReady of a live RayJob that is not held."""
    child, ready, desired = situation.child, situation.num_ready, situation.options.num_nodes
    if child is not None and child.is_elsewhere:
        return _elsewhere(child, desired)
    is_running = child is not None and child.deployment_status == "Running" and child.job_status == "RUNNING"
    if ready >= desired and is_running and (note := head_note(situation)):
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.NODES_NOT_READY, message=note)
    if ready >= desired:
        return ConditionValue(status=ConditionStatus.TRUE, reason=Reason.NODES_READY, message=f"All {desired} nodes have joined.")
    found = problem(situation)
    if found is None:
        reason = Reason.NODES_NOT_READY if is_running else Reason.STARTING
        message = " ".join(part for part in (_count(situation), _creation_note(situation)) if part)
        return ConditionValue(status=ConditionStatus.FALSE, reason=reason, message=message)
    return ConditionValue(status=ConditionStatus.FALSE, reason=found[0], message=f"{_count(situation)} {found[1]}")


def _elsewhere(child: ChildView, desired: int) -> ConditionValue:
    """The same where only the RayJob's status comes back: KubeRay starts the driver once all nodes are ready."""
    if child.deployment_status == "Running":
        message = f"All {desired} nodes have joined, on another cluster."
        return ConditionValue(status=ConditionStatus.TRUE, reason=Reason.NODES_READY, message=message)
    message = f"Nothing is known of the {desired} nodes, which are on another cluster."
    return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.STARTING, message=message)


def head_note(situation: Situation) -> str:
    """A sentence if the head pod of a running driver is not ready; empty otherwise."""
    names = [pod.name for pod in situation.pods if pod.is_head and not pod.ready and not pod.deleting]
    return f"Head pod {names[0]} is not ready: its node may have stopped answering." if names else ""


def is_created_late(pod: PodView, now: datetime) -> bool:
    """Whether a pod's node has long been creating its containers."""
    return pod.creating_since is not None and not pod.deleting and now - pod.creating_since >= CREATION_WAIT


def creation_check(situation: Situation) -> datetime | None:
    """When to look at pods that no scheduler has looked at, or whose containers are being created; None if there are none."""
    begun = [pod.creating_since + CREATION_WAIT for pod in situation.pods if pod.creating_since is not None and not pod.deleting]
    looked_at = [at if at > situation.now else situation.now + CREATION_CHECK for at in begun]
    waits = [pod.created + MACHINE_WAIT for pod in situation.pods if _awaits_scheduler(pod)]
    return min([*looked_at, *(at for at in waits if at > situation.now)], default=None)


def _awaits_scheduler(pod: PodView) -> bool:
    """Whether a scheduler has neither bound it nor reported why not, as YuniKorn while it gathers a gang, or one that is down."""
    return pod.phase == "Pending" and pod.scheduled_at is None and pod.unschedulable is None and not pod.deleting


def _creation_note(situation: Situation) -> str:
    """A sentence about pods whose containers have long been created, if there are any."""
    late = [pod for pod in situation.pods if is_created_late(pod, situation.now)]
    if not late or late[0].creating_since is None:
        return ""
    others = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    since = times.text(late[0].creating_since)
    return f"Pod {late[0].name}{others}: its node has been pulling images or mounting volumes since {since}."


def deadline(situation: Situation) -> datetime | None:
    """When the driver must be submitted; None if it is, while the job is held, and while nodes are missing for want of a machine.

    KubeRay 1.6 reports Running as soon as all nodes are ready, and then tries to submit without a limit of its own: until it has, the
    RayJob has no jobStatus (``rayjob_controller.go``). The clock runs from the last of: the RayJob's creation, the resumption of a
    suspended one, and the binding of its last pod that had to wait for a machine. It does not end before a pod that was just created, in
    place of one that waited perhaps, has been looked at by a scheduler.
    """
    child, options = situation.live_child, situation.options
    if child is None or situation.is_held or (child.deployment_status == "Running" and child.job_status):
        return None
    bound = [p.scheduled_at for p in situation.pods if p.scheduled_at is not None and p.scheduled_at - p.created >= MACHINE_WAIT]
    begun = max([child.created, situation.started, *bound])
    if _invalid_image(situation) is not None:
        return situation.now
    if waits_for_machine(situation):
        limit_s = options.scheduling_deadline_s
        return None if limit_s is None else max(child.created, situation.started) + timedelta(seconds=limit_s)
    looked_at = [pod.created + MACHINE_WAIT for pod in situation.pods if _awaits_scheduler(pod)]
    return max([begun + timedelta(seconds=options.startup_deadline_s), *looked_at])


def overdue(situation: Situation) -> Failure | None:
    """The failure of an attempt whose nodes were not ready in time, or whose driver was not submitted."""
    until = deadline(situation)
    if until is None or situation.now < until or situation.attempt is None:
        return None
    invalid = _invalid_image(situation)
    if invalid is not None:
        return Failure(attempt=situation.attempt, reason=Reason.IMAGE_UNAVAILABLE, message=invalid)
    found, options = problem(situation), situation.options
    name, limit_s = "startupDeadlineSeconds", options.startup_deadline_s
    if waits_for_machine(situation) and options.scheduling_deadline_s is not None:
        name, limit_s = "schedulingDeadlineSeconds", options.scheduling_deadline_s
    child = situation.live_child
    is_ready = child is not None and (child.is_elsewhere or situation.num_ready >= options.num_nodes)
    if is_ready and child is not None and child.deployment_status == "Running":
        message = f"KubeRay has not submitted the driver of RayJob {child.name} within {name} ({limit_s} s). {SUBMISSION_REMEDY}"
        return Failure(attempt=situation.attempt, reason=Reason.SUBMISSION_FAILED, message=message)
    message = f"Not ready within {name} ({limit_s} s): {_count(situation)}"
    return Failure(
        attempt=situation.attempt,
        reason=Reason.STARTUP_DEADLINE_EXCEEDED,
        message=" ".join(part for part in (message, found[1] if found else _creation_note(situation)) if part),
    )


def _invalid_image(situation: Situation) -> str | None:
    """What is wrong with an image that no amount of waiting will pull."""
    for pod in situation.pods:
        if pod.waiting is not None and pod.waiting[1] == "InvalidImageName" and not pod.deleting:
            return f"Pod {pod.name}, container {pod.waiting[0]}: InvalidImageName: {pod.waiting[2]}"
    return None


def problem(situation: Situation) -> Problem | None:
    """The most severe kind of problem that keeps nodes from becoming ready, with each different cause, such as what schedulers miss."""
    waiting = [pod for pod in situation.pods if not pod.ready and not pod.deleting]
    problems = [(pod, *each) for pod in waiting for each in _pod_problem(pod, situation.now)]
    found = [(reason, text, text.removeprefix(f"Pod {pod.name}")) for pod, reason, text in problems]
    name = situation.child.cluster_name if situation.child is not None else ""
    for cluster in situation.observed.clusters:
        if cluster.replica_failure is not None and cluster.name == name:
            text = f"KubeRay cannot create the pods of RayCluster {name}: {cluster.replica_failure}"
            found.append((Reason.POD_FAILED, text, text))
    if not found:
        return None
    worst = min((reason for reason, _, _ in found), key=_PRIORITY.index)
    return worst, _by_cause([(text, cause) for reason, text, cause in found if reason is worst])


def waits_for_machine(situation: Situation) -> bool:
    """Whether some pod cannot be scheduled, whatever worse problems others have."""
    waiting = (pod for pod in situation.pods if not pod.ready and not pod.deleting)
    return any(reason is Reason.UNSCHEDULABLE for pod in waiting for reason, _ in _pod_problem(pod, situation.now))


def _by_cause(found: Sequence[tuple[str, str]]) -> str:
    """Texts with their causes: the first one of each cause, by the pods' names, stands for the others."""
    alike: dict[str, list[str]] = {}
    for text, cause in found:
        alike.setdefault(cause, []).append(text)
    shown = [f"{texts[0]} (and {len(texts) - 1} more)" if len(texts) > 1 else texts[0] for texts in alike.values()]
    hidden = sum(len(texts) for texts in list(alike.values())[MAX_CAUSES:])
    return "; ".join([*shown[:MAX_CAUSES], *([f"and {hidden} more, for other causes"] if hidden else [])])


def _pod_problem(pod: PodView, now: datetime) -> Iterator[Problem]:
    if pod.waiting is not None and pod.waiting[1] in IMAGE_REASONS:
        container, reason, message = pod.waiting
        yield Reason.IMAGE_UNAVAILABLE, f"Pod {pod.name}, container {container}: {reason_class(reason)}: {message}"
    elif pod.terminated is not None:
        yield Reason.POD_FAILED, terminated_text(pod)
    elif pod.waiting is not None:
        container, reason, message = pod.waiting
        yield Reason.POD_FAILED, f"Pod {pod.name}, container {container}: {reason}: {message}"
    elif pod.warning is not None:
        yield Reason.POD_FAILED, f"Pod {pod.name}, whose containers its node cannot create: {pod.warning}"
    elif pod.unschedulable is not None:
        yield Reason.UNSCHEDULABLE, f"Pod {pod.name}: {pod.unschedulable}"
    elif _awaits_scheduler(pod) and now - pod.created >= MACHINE_WAIT:
        yield Reason.UNSCHEDULABLE, f"Pod {pod.name}: no scheduler has bound it or reported why not."


def reason_class(reason: str) -> str:
    """One text for the two reasons that the kubelet alternates between, so that the message does not flap."""
    return "image cannot be pulled" if reason in ("ErrImagePull", "ImagePullBackOff") else reason


def terminated_text(pod: PodView) -> str:
    """How a container of a pod terminated, for example ``Pod x, container ray terminated: OOMKilled, exit code 137``."""
    if pod.terminated is None:
        return f"Pod {pod.name} terminated"
    container, reason, code = pod.terminated
    if not container:
        return f"Pod {pod.name} terminated: {reason}" + (f": {pod.end_message}" if pod.end_message else "")
    return f"Pod {pod.name}, container {container} terminated: {reason}, exit code {code}"


def count_text(ready: int, desired: int) -> str:
    """Number of ready nodes, as a sentence."""
    return f"{ready} of {desired} nodes are ready."


def _count(situation: Situation) -> str:
    return count_text(situation.num_ready, situation.options.num_nodes)
