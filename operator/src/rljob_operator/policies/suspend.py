"""Keeping a job off its devices: through spec.suspend, or by Kueue through spec.suspend of the RayJob.

====================  ============================================  ==============================================
spec.suspend, queue   RayJob                                        action
====================  ============================================  ==============================================
true, no queue        live, not suspended                           patch suspend: true
true, queue           live                                          record that, then delete it: Kueue resumes what it has admitted
true, any             suspended, or none live                       held; Suspended=True once the nodes are released
false, any            deleted while it was suspended                made again, for the same attempt
false, no queue       suspended                                     patch suspend: false (see ``resume``)
false, queue          suspended                                     held as Queued; only Kueue resumes it
false, no queue       suspended, and Kueue has a Workload of it     the same, until somebody gives it a queue
====================  ============================================  ==============================================

The RayJob is deleted only when the stored condition names the suspension: whatever happens between deletion and next status, like
a user who resumes the job at that moment, the missing RayJob is then known to be the operator's own doing (``Situation.is_parked``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_api.naming import QUEUE_LABEL
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator.model import ChildView
from rljob_operator.policies import handover
from rljob_operator.policies.situation import Situation

NOTE_CHECK, FIRST_NOTE_CHECK = timedelta(seconds=120), timedelta(seconds=15)
"""See :func:`queue_check`."""
FIRST_NOTE_WAIT = timedelta(minutes=2)
"""How long after its RayJob was created a Workload is expected to say something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """The job must not hold devices."""

    reason: Reason
    is_released: bool
    """Whether all its nodes are released."""
    message: str
    to_delete: str | None = None
    """RayJob to delete, whose quota in its queue is given back so."""
    to_suspend: str | None = None
    """RayJob to suspend."""
    is_unrecorded: bool = False
    """Whether the suspension has to be in the status before the RayJob is deleted."""
    next_check: datetime | None = None
    """When Kueue may say something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A suspended RayJob should resume."""

    to_resume: str | None
    """RayJob to resume; None while something prevents it."""
    message: str
    next_check: datetime | None


def hold(situation: Situation) -> Hold | None:
    """How the job is held; None if it may run."""
    child = situation.live_child
    if not situation.is_held:
        return None
    reason = Reason.SUSPENDED if situation.options.suspend else Reason.QUEUED
    why = "spec.suspend is true." if situation.options.suspend else _queued(situation, child)
    if child is None:
        return Hold(reason=reason, is_released=True, message=why)
    if situation.options.suspend and situation.is_queued:
        is_recorded = situation.stored[ConditionType.SUSPENDED].reason is Reason.SUSPENDED
        message = f"{why} RayJob {child.name} is being deleted."
        to_delete = child.name if is_recorded and not child.deleting else None
        return Hold(reason=reason, is_released=False, message=message, to_delete=to_delete, is_unrecorded=not is_recorded)
    to_suspend = None if child.suspend or child.deleting else child.name
    # A RayJob that was created suspended goes through Initializing and Suspending without ever having a pod.
    is_released = child.suspend and (child.deployment_status == "Suspended" or not situation.pods)
    message = why if is_released else f"{why} RayJob {child.name} still holds nodes."
    next_check = _note_check(situation, child) if reason is Reason.QUEUED else None
    return Hold(reason=reason, is_released=is_released, message=message, to_suspend=to_suspend, next_check=next_check)


def queue_check(note: str) -> timedelta:
    """How long what Kueue says of a job that it holds is not asked for again; it takes a moment to say anything."""
    return NOTE_CHECK if note else FIRST_NOTE_CHECK


def _note_check(situation: Situation, child: ChildView) -> datetime | None:
    """When to ask again; a Workload that has said nothing for long is not there, or cannot be read."""
    is_expected = child.queue_note or situation.now - child.created < FIRST_NOTE_WAIT
    return situation.now + queue_check(child.queue_note) if (child.queue or child.has_workload) and is_expected else None


def _queued(situation: Situation, child: ChildView | None) -> str:
    """Why Kueue holds a job, in its words where they are known."""
    queue, note = situation.options.queue, ""
    if child is not None:
        queue, note = child.queue or queue, child.queue_note.rstrip(".")
    if child is not None and not queue:
        said = f": {note}" if note else ""
        return (
            f"Kueue manages jobs without a queue here (manageJobsWithoutQueueName) and holds RayJob {child.name}{said}. "
            f"Create the RLJob again with spec.queue, or run kubectl label rayjob {child.name} {QUEUE_LABEL}=<a LocalQueue>."
        )
    if note:
        return f"Queued in {queue}: {note}."
    said = "kubectl describe workloads says what is missing, or that there is no such queue"
    return f"Waiting for quota in queue {queue}, or preempted there: {said}."


def resume(situation: Situation) -> Resume | None:
    """How to resume the suspended RayJob of a job that is not held; None if it is not suspended.

    KubeRay finishes suspending a RayJob before it can resume it.
    """
    child = situation.live_child
    if child is None or not child.suspend:
        return None
    if child.deployment_status != "Suspended":
        message = f"RayJob {child.name} resumes once KubeRay has finished suspending it"
        return Resume(to_resume=None, message=message, next_check=None)
    wait = handover.wait_for_heads(situation, since=situation.started)
    if wait is not None:
        return Resume(to_resume=None, message=f"RayJob {child.name} resumes once {wait.message}", next_check=wait.until)
    return Resume(to_resume=child.name, message=f"RayJob {child.name} resumes", next_check=None)
