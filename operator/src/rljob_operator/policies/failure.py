"""Why an attempt failed, with enough detail that nobody has to look for pods that no longer exist.

The first matching row applies:

====================================================  =============================================================
observation                                           reason
====================================================  =============================================================
RayJob missing or being deleted                       ChildDeleted
RayJob ended; the driver left a termination message   the driver's reason; OutOfMemory for WorkerLost if a pod shows it
RayJob ended; a container was OOMKilled               OutOfMemory
RayJob Complete or Failed with jobStatus STOPPED      Stopped
RayJob ended otherwise                                by KubeRay's reason, see ``_KUBERAY``
driver running, its head pod is being deleted         Evicted, at once: the driver's end may never reach the RayJob
driver running, its head pod ended or was replaced    HeadLost, OutOfMemory, or Evicted if the cluster ended the pod for another
                                                      reason than a limit of its own
====================================================  =============================================================
"""

from __future__ import annotations

import re

from rljob_api import termination
from rljob_api.naming import RAY_CONTAINER
from rljob_api.vocabulary import Reason
from rljob_operator.model import ChildView, Failure, PodView
from rljob_operator.policies.situation import ENDED, Situation
from rljob_operator.policies.startup import terminated_text

MAX_HEADLINE = 400
"""Maximum length of a failure quoted in another message, in characters."""
MAX_MESSAGE = 2600
"""Maximum length of a failure message, in characters; it is stored twice, and a status stays below 10 kB."""
DRIVER_ACTIVE = ("PENDING", "RUNNING")
"""Values of jobStatus while Ray runs the driver."""

_KUBERAY = {
    "SubmissionFailed": Reason.SUBMISSION_FAILED,
    "DeadlineExceeded": Reason.DEADLINE_EXCEEDED,
    "PreRunningDeadlineExceeded": Reason.STARTUP_DEADLINE_EXCEEDED,
    "JobDeploymentStatusTransitionGracePeriodExceeded": Reason.HEAD_LOST,
    "AppFailed": Reason.DRIVER_FAILED,
}
_OWN_LIMIT = re.compile(
    r"ephemeral local storage usage exceeds the total limit|exceeded its local ephemeral storage limit|Usage of EmptyDir volume"
)
"""In the kubelet's words for evictions that say something about the job: it wrote more than it may, and would again."""
_EXIT_CODE = re.compile(r"exit code (-?\d{1,9})\b")


def find(situation: Situation) -> Failure | None:
    """The failure of the current attempt; None before the first attempt and while it is running."""
    if situation.attempt is None:
        return None
    child = situation.child
    if child is None or child.deleting:
        if situation.is_parked:
            return None  # no driver runs; the RayJob is made again when the job resumes
    if child is None:
        return Failure(attempt=situation.attempt, reason=Reason.CHILD_DELETED, message="The RayJob was deleted externally.")
    if child.deployment_status in ENDED:
        return _ended(situation, child)
    if child.deleting:
        message = f"RayJob {child.name} was deleted externally."
        return Failure(attempt=child.attempt, reason=Reason.CHILD_DELETED, message=message)
    return _head_lost(situation, child)


def headline(message: str) -> str:
    """First line of a failure message, shortened, with final punctuation."""
    line = termination.shorten(message.partition("\n")[0].strip(), MAX_HEADLINE)
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _ended(situation: Situation, child: ChildView) -> Failure:
    if child.deployment_status == "ValidationFailed":
        return _failure(child, Reason.CHILD_REJECTED, f"KubeRay rejected RayJob {child.name}: {child.message}")
    killed = _oom_killed(situation)
    reported = termination.decode(child.message)
    if reported is not None:
        return _reported(situation, child, reported, killed)
    if killed is not None:
        return _failure(child, Reason.OUT_OF_MEMORY, _with_log(f"{terminated_text(killed)}.", child.message), killed)
    if child.job_status == "STOPPED":
        return _failure(child, Reason.STOPPED, "The Ray job was stopped, for example in the Ray dashboard.")
    return _by_kuberay(situation, child)


def _reported(situation: Situation, child: ChildView, reported: termination.DriverFailure, killed: PodView | None) -> Failure:
    """The driver's own termination message, with the pod that explains a lost worker in front."""
    reason, pod = reported.reason, None
    if reason is Reason.WORKER_LOST:
        reason, pod = (Reason.OUT_OF_MEMORY, killed) if killed is not None else (reason, _culprit(situation))
    if reason is Reason.EVICTED and (over := next(filter(_is_over_its_limit, situation.pods), None)) is not None:
        reason, pod = Reason.WORKER_LOST, over
    observed = "" if pod is None else f"{_over_its_limit_text(pod) if _is_over_its_limit(pod) else f'{terminated_text(pod)}.'} "
    worker = f"{reported.worker}: " if reported.worker and reported.worker not in reported.message else ""
    return _failure(child, reason, _with_log(f"{observed}{worker}{reported.message}", child.message), pod)


def _by_kuberay(situation: Situation, child: ChildView) -> Failure:
    reason = _KUBERAY.get(child.reason, Reason.DRIVER_FAILED)
    if child.reason == "AppFailed" and child.job_status != "FAILED":
        reason = Reason.HEAD_LOST  # Ray never reported that the driver ended: the head that ran it is gone
    culprit = _culprit(situation) if reason is not Reason.DRIVER_FAILED else None
    observed = f" {terminated_text(culprit)}." if culprit is not None else ""
    code = _EXIT_CODE.search(child.message) if reason is Reason.DRIVER_FAILED else None
    exit_code = int(code.group(1)) if code else None
    what = f"RayJob {child.name} ended as {child.deployment_status}" + (f" ({child.reason})" if child.reason else "")
    if reason is Reason.DRIVER_FAILED:
        what = "The driver exited" + (f" with code {exit_code}" if code else "") + " without reporting an error"
    return _failure(child, reason, _with_log(f"{what}.{observed}", child.message), culprit, exit_code)


def _head_lost(situation: Situation, child: ChildView) -> Failure | None:
    if not runs_driver(child):
        return None
    for pod in situation.pods:
        if not pod.is_head:
            continue
        if pod.terminated is not None and pod.terminated[1] == "OOMKilled" and _has_ended(pod, child):
            return _failure(child, Reason.OUT_OF_MEMORY, f"The driver was lost: {terminated_text(pod)}.", pod)
        if _is_over_its_limit(pod):
            return _failure(child, Reason.HEAD_LOST, f"The driver was lost: {_over_its_limit_text(pod)}", pod)
        if pod.disruption is not None:
            return _failure(child, Reason.EVICTED, f"The pod of the driver, {pod.name}, is being evicted: {pod.disruption}", pod)
        if pod.deleting:
            return _failure(child, Reason.EVICTED, f"The pod of the driver, {pod.name}, is being deleted.", pod)
        if _has_ended(pod, child):
            return _failure(child, Reason.HEAD_LOST, f"The driver was lost: {terminated_text(pod)}.", pod)
        if situation.driver_pod not in (None, pod.name):
            message = f"The driver was lost with its pod; the replacement, pod {pod.name}, has no state of the run."
            return _failure(child, Reason.HEAD_LOST, message, pod)
    return None


def runs_driver(child: ChildView) -> bool:
    """Whether KubeRay counts on a running driver: not while it suspends the RayJob, and not after the end."""
    return not child.suspend and child.deployment_status == "Running" and child.job_status in DRIVER_ACTIVE


def _has_ended(pod: PodView, child: ChildView) -> bool:
    if pod.phase in ("Failed", "Succeeded"):
        return True
    if pod.terminated is None or pod.terminated[0] != RAY_CONTAINER:
        return False
    # A termination before the driver started does not matter: the container was restarted and the driver runs in it.
    return pod.terminated_at is None or child.job_started is None or pod.terminated_at >= child.job_started


def _is_over_its_limit(pod: PodView) -> bool:
    """Whether the kubelet evicted the pod because it wrote more than its own limits allow."""
    return _OWN_LIMIT.search(pod.end_message) is not None


def _over_its_limit_text(pod: PodView) -> str:
    """What the kubelet said of it, and a remedy."""
    remedy = "raise resources.limits.ephemeral-storage, or write to spec.storage"
    return f"Pod {pod.name} was evicted for what it wrote: {pod.end_message}; {remedy}."


def _oom_killed(situation: Situation) -> PodView | None:
    return next((pod for pod in situation.pods if pod.terminated is not None and pod.terminated[1] == "OOMKilled"), None)


def _culprit(situation: Situation) -> PodView | None:
    """A pod that failed before it was deleted: at cluster shutdown all pods end, which explains nothing."""
    ended = [pod for pod in situation.pods if pod.terminated is not None and not pod.deleting]
    return min(ended, key=lambda pod: (not pod.is_head, pod.name), default=None)


def _with_log(what: str, log: str) -> str:
    """``what``, then the tail of the driver's log without its termination message, which ``what`` repeats."""
    lines = [line for line in log.splitlines() if termination.MARKER not in line]
    return "\n".join([what, *lines])


def _failure(child: ChildView, reason: Reason, message: str, pod: PodView | None = None, exit_code: int | None = None) -> Failure:
    if pod is not None and pod.terminated is not None and pod.terminated[0]:
        exit_code = pod.terminated[2]
    return Failure(
        attempt=child.attempt,
        reason=reason,
        message=termination.shorten(message, MAX_MESSAGE),
        pod_name=pod.name if pod is not None else None,
        exit_code=exit_code,
    )
