"""How an attempt ended that did not succeed, told so that nobody has to look for pods that are gone.

The first of these that holds is the end of the attempt:

====================================================  =============================================================
observation                                           reason
====================================================  =============================================================
RayJob absent or being deleted                        ChildDeleted
RayJob ended; the driver said why in its last line    the driver's reason; WorkerLost is OutOfMemory if a pod shows it
RayJob ended; a pod was killed for its memory use     OutOfMemory
RayJob Complete or Failed with jobStatus STOPPED      Stopped
RayJob ended otherwise                                by KubeRay's reason, see ``_KUBERAY``
driver runs, its head pod ended or is a newer one     HeadLost, or OutOfMemory
====================================================  =============================================================
"""

from __future__ import annotations

import re
from datetime import timedelta

from rljob_api import failure as words
from rljob_api.naming import RAY_CONTAINER
from rljob_api.vocabulary import Reason
from rljob_operator.model import ChildView, Failure, PodView
from rljob_operator.policies.situation import ENDED, Situation
from rljob_operator.policies.startup import ended_text

MAX_HEADLINE = 400
"""Characters of a failure in messages that tell it in passing."""
MAX_MESSAGE = 2600
"""Characters of a failure's whole message; it is stored twice, and a status stays below 10 kB."""
CLOCK_SKEW = timedelta(seconds=30)
"""By how much the clocks of API server and head node may differ. A head replaced sooner runs the driver anew, which resumes."""
DRIVER_ACTIVE = ("PENDING", "RUNNING")
"""jobStatus while Ray runs the driver."""

_KUBERAY = {
    "SubmissionFailed": Reason.SUBMISSION_FAILED,
    "DeadlineExceeded": Reason.DEADLINE_EXCEEDED,
    "PreRunningDeadlineExceeded": Reason.STARTUP_DEADLINE_EXCEEDED,
    "JobDeploymentStatusTransitionGracePeriodExceeded": Reason.HEAD_LOST,
    "AppFailed": Reason.DRIVER_FAILED,
}
_EXIT_CODE = re.compile(r"exit code (-?\d{1,9})\b")


def find(situation: Situation) -> Failure | None:
    """The end of the current attempt if it failed; None before the first attempt and while it goes on."""
    if situation.attempt is None:
        return None
    child = situation.child
    if child is None:
        return Failure(attempt=situation.attempt, reason=Reason.CHILD_DELETED, message="The RayJob was deleted by somebody.")
    if child.deployment_status in ENDED:
        return _ended(situation, child)
    if child.deleting:
        message = f"RayJob {child.name} was deleted by somebody."
        return Failure(attempt=child.attempt, reason=Reason.CHILD_DELETED, message=message)
    return _head_lost(situation, child)


def headline(message: str) -> str:
    """The first line of a failure's message, shortened, ending as a sentence does."""
    line = words.shorten(message.partition("\n")[0].strip(), MAX_HEADLINE)
    return line if line.endswith((".", "!", "?")) else f"{line}."


def _ended(situation: Situation, child: ChildView) -> Failure:
    if child.deployment_status == "ValidationFailed":
        return _failure(child, Reason.CHILD_REJECTED, f"KubeRay refuses RayJob {child.name}: {child.message}")
    killed = _out_of_memory(situation)
    word = words.decode(child.message)
    if word is not None:
        where = f"{word.worker}: " if word.worker and word.worker not in word.message else ""
        if word.reason is Reason.WORKER_LOST and killed is not None:
            return _failure(child, Reason.OUT_OF_MEMORY, _with_log(f"{ended_text(killed)}. {where}{word.message}", child.message), killed)
        culprit = _culprit(situation) if word.reason is Reason.WORKER_LOST else None
        seen = f"{ended_text(culprit)}. " if culprit is not None else ""
        return _failure(child, word.reason, _with_log(f"{seen}{where}{word.message}", child.message), culprit)
    if killed is not None:
        return _failure(child, Reason.OUT_OF_MEMORY, _with_log(f"{ended_text(killed)}.", child.message), killed)
    if child.job_status == "STOPPED":
        return _failure(child, Reason.STOPPED, "The Ray job was stopped, for example in the Ray dashboard.")
    return _by_kuberay(situation, child)


def _by_kuberay(situation: Situation, child: ChildView) -> Failure:
    reason = _KUBERAY.get(child.reason, Reason.DRIVER_FAILED)
    if child.reason == "AppFailed" and child.job_status != "FAILED":
        reason = Reason.HEAD_LOST  # Ray never reported the driver's end: whoever runs it is gone
    culprit = _culprit(situation) if reason is not Reason.DRIVER_FAILED else None
    seen = f" {ended_text(culprit)}." if culprit is not None else ""
    code = _EXIT_CODE.search(child.message) if reason is Reason.DRIVER_FAILED else None
    exit_code = int(code.group(1)) if code else None
    what = f"RayJob {child.name} ended as {child.deployment_status}" + (f" ({child.reason})" if child.reason else "")
    if reason is Reason.DRIVER_FAILED:
        what = "The driver ended" + (f" with exit code {exit_code}" if code else "") + " and did not say why"
    return _failure(child, reason, _with_log(f"{what}.{seen}", child.message), culprit, exit_code)


def _head_lost(situation: Situation, child: ChildView) -> Failure | None:
    if child.suspend or child.deployment_status != "Running" or child.job_status not in DRIVER_ACTIVE:
        return None
    for pod in situation.pods:
        if not pod.is_head:
            continue
        # Pods that are being deleted end as they should: their cluster was told to go, and the RayJob says why, now or soon.
        if not pod.deleting and _has_ended(pod, child):
            reason = Reason.OUT_OF_MEMORY if pod.terminated is not None and pod.terminated[1] == "OOMKilled" else Reason.HEAD_LOST
            return _failure(child, reason, f"The driver is gone: {ended_text(pod)}.", pod)
        if child.job_started is not None and pod.created > child.job_started + CLOCK_SKEW:
            message = f"The driver is gone with its pod; pod {pod.name} was made in its place and knows nothing of the run."
            return _failure(child, Reason.HEAD_LOST, message, pod)
    return None


def _has_ended(pod: PodView, child: ChildView) -> bool:
    if pod.phase in ("Failed", "Succeeded"):
        return True
    if pod.terminated is None or pod.terminated[0] != RAY_CONTAINER:
        return False
    # An end before the driver was started is history: the container was started again and the driver runs in it.
    return pod.terminated_at is None or child.job_started is None or pod.terminated_at >= child.job_started


def _out_of_memory(situation: Situation) -> PodView | None:
    return next((pod for pod in situation.pods if pod.terminated is not None and pod.terminated[1] == "OOMKilled"), None)


def _culprit(situation: Situation) -> PodView | None:
    """A pod that ended badly before anybody deleted it: with the cluster's end all pods end, which explains nothing."""
    ended = [pod for pod in situation.pods if pod.terminated is not None and not pod.deleting]
    return min(ended, key=lambda pod: (not pod.is_head, pod.name), default=None)


def _with_log(what: str, log: str) -> str:
    """The end of the driver's log below, without its last word, which ``what`` tells."""
    lines = [line for line in log.splitlines() if words.MARKER not in line]
    return "\n".join([what, *lines])


def _failure(child: ChildView, reason: Reason, message: str, pod: PodView | None = None, exit_code: int | None = None) -> Failure:
    if pod is not None and pod.terminated is not None and pod.terminated[0]:
        exit_code = pod.terminated[2]
    return Failure(
        attempt=child.attempt,
        reason=reason,
        message=words.shorten(message, MAX_MESSAGE),
        pod_name=pod.name if pod is not None else None,
        exit_code=exit_code,
    )
