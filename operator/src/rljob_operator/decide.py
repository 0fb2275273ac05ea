r"""What to do about one RLJob: pure, level-triggered, from what is observed now and nothing else.

::

    Observed, now --assess--> Situation
                                 |
       being deleted, not ours   +--> nothing
       finished, as stored       +--> delete a RayJob that still lives; delete the job after its time to live
                                 |
       RayJob SUCCEEDED          +--> Succeeded=True, for good
       attempt ended otherwise   +--> record the failure ---- no restart left ----> Failed=True, for good
         (own end, RayJob gone,  |                      \--- restart --------> Restarting
          head lost, start-up    |
          deadline)              |
       active deadline           +--> record the failure, Failed=True, for good
                                 |
       failure recorded          +--> delete its RayJob if it lives --> backoff, old head pod --> create attempt n + 1
       no attempt yet            +--> create attempt 1
       RayJob lives              +--> hold, resume, or tell how far its start is

    Decision --> actions, then one status, then events

The first line that applies wins. Spec invalid, spec.suspend, a refused child and a taken name stand between "create" and the act.

Named promises (tests/property/test_operator_decide.py): QUIET (what was decided, once done, is not decided again), TERMINAL (a finished job
stays as it is), ONE-CHILD (no attempt is made while another one's RayJob lives), and attempts never count down.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator.model import ConditionValue, Decision, Failure, Observed
from rljob_operator.policies import admission, deadline, failure, handover, restart, startup, success, ttl
from rljob_operator.policies import suspend as suspension
from rljob_operator.policies.admission import is_managed
from rljob_operator.policies.situation import Recorded, Situation, assess

__all__ = ["decide", "is_managed"]

TAKEN_RETRY = timedelta(seconds=30)
"""When to look again whether a taken name is free."""
REJECTED_RETRY = timedelta(seconds=60)
"""When to try again to make a child that the API server refused: a quota or policy may have changed."""

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def decide(observed: Observed, now: datetime) -> Decision:
    """Decide about one RLJob at a time with a zone."""
    situation = assess(observed, now)
    if situation.job.deleting or not is_managed(situation.job):
        return _unchanged(situation)
    if situation.is_finished:
        return _finished(situation)
    decision = _unfinished(situation)
    strays = tuple(child.name for child in situation.strays if not child.deleting)
    return replace(decision, delete_children=(*decision.delete_children, *strays)) if strays else decision


def _unfinished(situation: Situation) -> Decision:
    if success.succeeded(situation):
        return _succeeded(situation)
    if not situation.is_failure_recorded:
        found = failure.find(situation) or startup.overdue(situation)
        if found is not None:
            return _attempt_failed(situation, found)
    overdue = deadline.overdue(situation)
    if overdue is not None:
        return _failed(situation, overdue, overdue.message, is_new=True)
    if situation.is_failure_recorded and situation.last_failure is not None:
        return _after_failure(situation, situation.last_failure, is_new=False)
    if situation.attempt is None:
        return _start(situation, 1, None)
    return _live(situation)


# --- ends ---------------------------------------------------------------------------------------------------------------------------


def _unchanged(situation: Situation) -> Decision:
    return Decision(conditions=situation.stored, attempt=situation.attempt, set_suspend={}, start_time=situation.start_time)


def _finished(situation: Situation) -> Decision:
    """The job is over: what is stored stays; nothing of it may hold devices; then its time to live."""
    live = [situation.child] if situation.live_child is not None and situation.child is not None else []
    expiry = ttl.expires(situation)
    is_expired = expiry is not None and expiry <= situation.now
    return Decision(
        conditions=situation.stored,
        attempt=situation.attempt,
        set_suspend={},
        delete_children=tuple(child.name for child in (*situation.strays, *live) if not child.deleting),
        delete_job=is_expired,
        start_time=situation.start_time,
        completion_time=situation.completion_time or situation.now,
        next_check=None if is_expired else expiry,
    )


def _succeeded(situation: Situation) -> Decision:
    gone = ConditionValue(status=FALSE, reason=Reason.COMPLETED, message="All steps are done.")
    return Decision(
        conditions={
            ConditionType.ACCEPTED: admission.accepted(situation),
            ConditionType.SUSPENDED: _not_suspended(situation, Reason.COMPLETED),
            ConditionType.CLUSTER_READY: gone,
            ConditionType.RUNNING: gone,
            ConditionType.SUCCEEDED: replace(gone, status=TRUE),
            ConditionType.FAILED: replace(gone, message=""),
        },
        attempt=situation.attempt,
        set_suspend={},
        start_time=situation.start_time,
        completion_time=situation.now,
        next_check=situation.now if situation.options.ttl_s is not None else None,
    )


def _attempt_failed(situation: Situation, found: Failure) -> Decision:
    """The attempt's end is not in the status yet. What follows is told now and done later, see Decision."""
    return _after_failure(situation, Recorded(failure=found, time=situation.now), is_new=True)


def _after_failure(situation: Situation, recorded: Recorded, *, is_new: bool) -> Decision:
    verdict = restart.judge(situation.options, recorded)
    if not verdict.is_restart:
        ended = recorded.failure
        first, _, rest = ended.message.partition("\n")
        message = " ".join(part for part in (first, verdict.explanation) if part) + (f"\n{rest}" if rest else "")
        return _failed(situation, ended, message, is_new=is_new)
    decision = _restart(situation, recorded)
    if is_new:  # first stored, then acted on
        return replace(
            decision,
            attempt=situation.attempt,
            create_attempt=None,
            delete_children=(),
            failure=recorded.failure,
            next_check=situation.now,
        )
    return decision


def _failed(situation: Situation, ended: Failure, message: str, *, is_new: bool) -> Decision:
    short = ConditionValue(status=FALSE, reason=ended.reason, message=failure.headline(message))
    return Decision(
        conditions={
            ConditionType.ACCEPTED: admission.accepted(situation, ended),
            ConditionType.SUSPENDED: _not_suspended(situation, ended.reason),
            ConditionType.CLUSTER_READY: replace(short, message=""),
            ConditionType.RUNNING: replace(short, message=""),
            ConditionType.SUCCEEDED: short,
            ConditionType.FAILED: ConditionValue(status=TRUE, reason=ended.reason, message=message),
        },
        attempt=situation.attempt,
        set_suspend={},
        failure=ended if is_new else None,
        start_time=situation.start_time,
        completion_time=situation.now,
        next_check=situation.now,  # a RayJob that still lives is deleted once this is stored
    )


# --- starts -------------------------------------------------------------------------------------------------------------------------


def _restart(situation: Situation, recorded: Recorded) -> Decision:
    """A failed attempt is followed by another, once its RayJob has ended or is gone."""
    child = situation.live_child
    if child is None:
        return _start(situation, recorded.failure.attempt + 1, recorded)
    message = f"{restart.story(situation.options, recorded)}, when RayJob {child.name} is gone."
    if situation.options.suspend:
        held = suspension.Hold(reason=Reason.SUSPENDED, is_released=False, message=f"spec.suspend is true. {message}")
        decision = _held(situation, held)
    else:
        decision = _waiting(situation, Reason.RESTARTING, message, situation.start_time)
    return replace(decision, delete_children=() if child.deleting else (child.name,))


def _start(situation: Situation, number: int, after: Recorded | None) -> Decision:
    """Make an attempt unless something stands in the way; ``after`` is the failure it follows."""
    observed, start_time = situation.observed, situation.start_time
    story = "" if after is None else restart.story(situation.options, after)
    hold = suspension.hold(situation)
    if not situation.is_spec_valid:
        start_time = start_time if hold is None else None
        decision = _waiting(situation, Reason.SPEC_INVALID, "No RayJob is made from an invalid spec.", start_time)
        suspended = {} if hold is None else {ConditionType.SUSPENDED: _held(situation, hold).conditions[ConditionType.SUSPENDED]}
        return replace(decision, conditions={**decision.conditions, **suspended})
    if hold is not None:
        return _held(situation, replace(hold, message=f"{hold.message} {story}." if story else hold.message))
    if observed.rejected is not None:
        message = failure.headline(observed.rejected)
        return _waiting(situation, Reason.CHILD_REJECTED, message, start_time, situation.now + REJECTED_RETRY)
    if observed.taken_name is not None:
        message = f"{observed.taken_name} exists and is not this job's; delete it, or give the RLJob another name."
        return _waiting(situation, Reason.CHILD_NAME_TAKEN, message, start_time, situation.now + TAKEN_RETRY)
    reason = Reason.STARTING if after is None else Reason.RESTARTING
    story = story or f"Attempt {number} starts"
    if situation.strays:
        return _waiting(situation, reason, f"{story}, when RayJob {situation.strays[0].name} is gone.", start_time)
    ended = situation.job.created if after is None else after.time
    begin = ended if after is None else ended + restart.backoff(situation.options, after.failure.attempt)
    if begin > situation.now:
        return _waiting(situation, reason, f"{story}.", start_time, begin)
    wait = handover.wait_for_heads(situation, since=ended)
    if wait is not None:
        return _waiting(situation, reason, f"{story}, when {wait.message}.", start_time, wait.until)
    # The words of a RayJob that was just seen, so that seeing it is not another status to write.
    waiting = _waits_for_nodes(number, Reason.STARTING)
    cluster = replace(waiting, message=startup.count_text(0, situation.options.num_nodes))
    return Decision(
        conditions=_open(situation, cluster, waiting),
        attempt=number,
        create_attempt=number,
        set_suspend={},
        start_time=situation.started,
        next_check=_nearest(situation, _active_deadline(situation)),
    )


def _waits_for_nodes(attempt: int, reason: Reason) -> ConditionValue:
    return ConditionValue(status=FALSE, reason=reason, message=f"Attempt {attempt} waits for its nodes.")


def _live(situation: Situation) -> Decision:
    """The RayJob of the current attempt lives."""
    hold = suspension.hold(situation)
    if hold is not None:
        return _held(situation, hold)
    resume = suspension.resume(situation)
    until = startup.deadline(situation)
    if resume is not None:
        decision = _waiting(situation, Reason.STARTING, f"{resume.message}.", situation.started, resume.next_check)
        decision = replace(decision, set_suspend={resume.to_resume: False} if resume.to_resume else {})
        return replace(decision, next_check=_nearest(situation, decision.next_check, until))
    cluster = startup.cluster_ready(situation)
    child = situation.child
    if child is not None and child.deployment_status == "Running" and child.job_status == "RUNNING":
        running = ConditionValue(status=TRUE, reason=Reason.RUNNING, message=f"Attempt {child.attempt} trains.")
    elif cluster.status is TRUE:
        running = ConditionValue(status=FALSE, reason=Reason.STARTING, message=f"The driver of attempt {situation.attempt} starts.")
    else:
        running = _waits_for_nodes(situation.attempt or 1, cluster.reason)
    return Decision(
        conditions=_open(situation, cluster, running),
        attempt=situation.attempt,
        set_suspend={},
        start_time=situation.started,
        next_check=_nearest(situation, until, _active_deadline(situation)),
    )


def _held(situation: Situation, hold: suspension.Hold) -> Decision:
    """The job is to hold no devices: deadlines stop, and start anew with it."""
    idle = ConditionValue(status=FALSE, reason=hold.reason, message=hold.message)
    conditions = _open(situation, replace(idle, message=""), idle)
    conditions[ConditionType.SUSPENDED] = replace(idle, status=TRUE if hold.is_released else FALSE)
    return Decision(
        conditions=conditions,
        attempt=situation.attempt,
        set_suspend={hold.to_suspend: True} if hold.to_suspend else {},
        start_time=None,
    )


def _waiting(
    situation: Situation, reason: Reason, message: str, start_time: datetime | None, next_check: datetime | None = None
) -> Decision:
    """No driver runs, for one reason that all conditions give."""
    idle = ConditionValue(status=FALSE, reason=reason, message=message)
    # A restart's story is told by Running; the cluster's condition is about nodes.
    cluster = replace(idle, message="") if reason is Reason.RESTARTING else idle
    return Decision(
        conditions=_open(situation, cluster, idle),
        attempt=situation.attempt,
        set_suspend={},
        start_time=start_time,
        next_check=_nearest(situation, next_check, _active_deadline(situation)),
    )


def _open(situation: Situation, cluster: ConditionValue, running: ConditionValue) -> dict[ConditionType, ConditionValue]:
    """Conditions of a job that is not finished. Succeeded is the summary: it has the reason of what matters now."""
    return {
        ConditionType.ACCEPTED: admission.accepted(situation),
        ConditionType.SUSPENDED: _not_suspended(situation, running.reason),
        ConditionType.CLUSTER_READY: cluster,
        ConditionType.RUNNING: running,
        ConditionType.SUCCEEDED: ConditionValue(status=UNKNOWN, reason=running.reason, message=running.message),
        ConditionType.FAILED: ConditionValue(status=FALSE, reason=running.reason),
    }


def _not_suspended(situation: Situation, otherwise: Reason) -> ConditionValue:
    return ConditionValue(status=FALSE, reason=otherwise if situation.options.suspend else Reason.NOT_SUSPENDED)


def _active_deadline(situation: Situation) -> datetime | None:
    """When the job must be over, also in the pass that starts its clock."""
    limit_s = situation.options.active_deadline_s
    if limit_s is None or situation.is_held or situation.attempt is None:
        return None
    return situation.started + timedelta(seconds=limit_s)


def _nearest(situation: Situation, *times: datetime | None) -> datetime | None:
    """The next of several times."""
    return min((time for time in times if time is not None and time > situation.now), default=None)
