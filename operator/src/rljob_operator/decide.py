r"""Decides what to do about one RLJob: pure, level-triggered, a function of the current observation and nothing else.

::

    Observed, now --assess--> Situation
                                 |
       being deleted, not ours   +--> nothing
       finished, as stored       +--> delete a RayJob that is still live; delete the RLJob once its TTL has expired
                                 |
       RayJob SUCCEEDED          +--> Succeeded=True, final
       attempt ended otherwise   +--> record the failure ---- no restart left ----> Failed=True, final
         (driver exit, RayJob    |                      \--- restart --------> Restarting
          deleted, head lost,    |
          startup deadline)      |
       active deadline           +--> record the failure, Failed=True, final
                                 |
       failure recorded          +--> delete its RayJob if live --> backoff, previous head pod --> create attempt n + 1
       no attempt yet            +--> create attempt 1
       RayJob deleted while      +--> create it again, for the same attempt
         the job was suspended   |
       RayJob live               +--> hold, resume, or report startup progress

    Decision --> actions, then one status write, then events

The first matching line wins. An invalid or changed spec, spec.suspend, a rejected child and a name conflict each prevent "create".

Invariants (tests/property/test_operator_decide.py): QUIET (a decision that has been carried out is not made again), TERMINAL (a finished
job stays as it is), ONE-CHILD (no attempt is created while the RayJob of another one is live), and attempt numbers never decrease.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator.model import ConditionValue, Decision, Failure, Observed
from rljob_operator.policies import admission, deadline, failure, handover, isolation, restart, startup, success, ttl
from rljob_operator.policies import suspend as suspension
from rljob_operator.policies.admission import is_managed
from rljob_operator.policies.situation import RecordedFailure, Situation, assess

__all__ = ["decide", "is_managed"]

TAKEN_RETRY, LEAVING_RETRY = timedelta(seconds=30), timedelta(seconds=5)
"""Retry intervals after a name conflict, and after one that is about to end."""
REJECTED_RETRY = timedelta(seconds=60)
"""Retry interval after the API server rejected a child: a quota or policy may have changed."""

TRUE, FALSE, UNKNOWN = ConditionStatus.TRUE, ConditionStatus.FALSE, ConditionStatus.UNKNOWN


def decide(observed: Observed, now: datetime) -> Decision:
    """Decide about one RLJob; ``now`` is timezone-aware."""
    situation = assess(observed, now)
    if situation.job.deleting or not is_managed(situation.job):
        return _unchanged(situation)
    if situation.is_finished:
        return _finished(situation)
    decision = _with_refusal(situation, _unfinished(situation))
    orphans = tuple(child.name for child in situation.orphans if not child.deleting)
    return replace(decision, delete_children=(*decision.delete_children, *orphans)) if orphans else decision


def _unfinished(situation: Situation) -> Decision:
    if success.succeeded(situation):
        return _succeeded(situation)
    if not situation.is_failure_recorded:
        found = failure.find(situation) or startup.overdue(situation) or isolation.lost(situation)
        if found is not None:
            return _attempt_failed(situation, found)
    overdue = deadline.overdue(situation)
    if overdue is not None:
        return _failed(situation, overdue, overdue.message, is_new=True)
    if situation.is_failure_recorded and situation.last_failure is not None:
        return _after_failure(situation, situation.last_failure, is_new=False)
    if situation.attempt is None or situation.live_child is None:
        return _start(situation, situation.attempt or 1, None)
    return _live(situation)


# --- terminal -----------------------------------------------------------------------------------------------------------------------


def _unchanged(situation: Situation) -> Decision:
    return Decision(conditions=situation.stored, attempt=situation.attempt, set_suspend={}, start_time=situation.start_time)


def _finished(situation: Situation) -> Decision:
    """The job is finished: its status is final, its RayJobs must release their devices, then its TTL runs."""
    live = [situation.child] if situation.live_child is not None and situation.child is not None else []
    expiry = ttl.expires(situation)
    is_expired = expiry is not None and expiry <= situation.now
    return Decision(
        conditions=situation.stored,
        attempt=situation.attempt,
        set_suspend={},
        delete_children=tuple(child.name for child in (*situation.orphans, *live) if not child.deleting),
        delete_job=is_expired,
        start_time=situation.start_time,
        completion_time=situation.completion_time or situation.now,
        next_check=None if is_expired else expiry,
    )


def _succeeded(situation: Situation) -> Decision:
    inactive = ConditionValue(status=FALSE, reason=Reason.COMPLETED, message="All training steps completed.")
    return Decision(
        conditions={
            ConditionType.ACCEPTED: admission.accepted(situation),
            ConditionType.SUSPENDED: _not_suspended(situation, Reason.COMPLETED),
            ConditionType.CLUSTER_READY: inactive,
            ConditionType.RUNNING: inactive,
            ConditionType.SUCCEEDED: replace(inactive, status=TRUE),
            ConditionType.FAILED: replace(inactive, message=""),
        },
        attempt=situation.attempt,
        set_suspend={},
        start_time=situation.start_time,
        completion_time=situation.now,
        next_check=situation.now if situation.options.ttl_s is not None else None,
    )


def _attempt_failed(situation: Situation, found: Failure) -> Decision:
    """The failure is not in the status yet: report what follows now, act on it in a later pass (see Decision)."""
    return _after_failure(situation, situation.new_failure(found), is_new=True)


def _after_failure(situation: Situation, recorded: RecordedFailure, *, is_new: bool) -> Decision:
    next_step = restart.evaluate(situation.options, recorded)
    if not next_step.is_restart:
        final = recorded.failure
        first, _, rest = final.message.partition("\n")
        message = " ".join(part for part in (first, next_step.explanation) if part) + (f"\n{rest}" if rest else "")
        return _failed(situation, final, message, is_new=is_new)
    decision = _restart(situation, recorded)
    if is_new:  # stored first, acted on afterwards
        return replace(
            decision,
            attempt=situation.attempt,
            create_attempt=None,
            delete_children=(),
            failure=recorded.failure,
            next_check=situation.now,
        )
    return decision


def _failed(situation: Situation, final: Failure, message: str, *, is_new: bool) -> Decision:
    short = ConditionValue(status=FALSE, reason=final.reason, message=failure.headline(message))
    return Decision(
        conditions={
            ConditionType.ACCEPTED: admission.accepted(situation, final),
            ConditionType.SUSPENDED: _not_suspended(situation, final.reason),
            ConditionType.CLUSTER_READY: replace(short, message=""),
            ConditionType.RUNNING: replace(short, message=""),
            ConditionType.SUCCEEDED: short,
            ConditionType.FAILED: ConditionValue(status=TRUE, reason=final.reason, message=message),
        },
        attempt=situation.attempt,
        set_suspend={},
        failure=final if is_new else None,
        start_time=situation.start_time,
        completion_time=situation.now,
        next_check=situation.now,  # a RayJob that is still live is deleted once this is stored
    )


# --- active -------------------------------------------------------------------------------------------------------------------------


def _restart(situation: Situation, recorded: RecordedFailure) -> Decision:
    """Start the next attempt once the RayJob of the failed one has ended or is gone."""
    child = situation.live_child
    if child is None:
        return _start(situation, recorded.failure.attempt + 1, recorded)
    message = f"{restart.summary(situation.options, recorded)} once RayJob {child.name} is gone."
    if situation.options.suspend:
        held = suspension.Hold(reason=Reason.SUSPENDED, is_released=False, message=f"spec.suspend is true. {message}")
        decision = _held(situation, held)
    else:
        decision = _waiting(situation, Reason.RESTARTING, message, situation.start_time)
    return replace(decision, delete_children=() if child.deleting else (child.name,))


def _start(situation: Situation, number: int, after: RecordedFailure | None) -> Decision:
    """Create an attempt unless something prevents it; ``after`` is the failure it follows."""
    observed, start_time = situation.observed, situation.start_time
    summary = "" if after is None else restart.summary(situation.options, after)
    hold = suspension.hold(situation)
    refused = (Reason.SPEC_INVALID, "No RayJob is created from an invalid spec.") if not situation.is_spec_valid else None
    if situation.changed_fields:
        refused = (Reason.SPEC_CHANGED, "No RayJob is created from a spec that was changed after the job began.")
    if refused is not None:
        start_time = start_time if hold is None else None
        decision = _waiting(situation, *refused, start_time)
        suspended = {} if hold is None else {ConditionType.SUSPENDED: _held(situation, hold).conditions[ConditionType.SUSPENDED]}
        return replace(decision, conditions={**decision.conditions, **suspended})
    if hold is not None:
        return _held(situation, replace(hold, message=f"{hold.message} {summary}." if summary else hold.message))
    if observed.rejected is not None:
        message = failure.headline(observed.rejected)
        return _waiting(situation, Reason.CHILD_REJECTED, message, start_time, situation.now + REJECTED_RETRY)
    if observed.unavailable is not None:
        message = failure.headline(observed.unavailable)
        return _waiting(situation, Reason.API_UNAVAILABLE, message, start_time, situation.now + REJECTED_RETRY)
    if observed.taken_name is not None and observed.is_taken_one_leaving:
        message = f"Attempt {number} starts once {observed.taken_name} of an earlier RLJob of this name is gone."
        return _waiting(situation, Reason.STARTING, message, start_time, situation.now + LEAVING_RETRY)
    if observed.taken_name is not None:
        message = f"{observed.taken_name} already exists and is not owned by this RLJob; delete it or rename the RLJob."
        return _waiting(situation, Reason.CHILD_NAME_TAKEN, message, start_time, situation.now + TAKEN_RETRY)
    reason = Reason.STARTING if after is None else Reason.RESTARTING
    summary = summary or f"Attempt {number} starts"
    if situation.orphans:
        return _waiting(situation, reason, f"{summary} once RayJob {situation.orphans[0].name} is gone.", start_time)
    ended = situation.job.created if after is None else after.time
    begin = ended if after is None else ended + restart.backoff(situation.options, after)
    if begin > situation.now:
        return _waiting(situation, reason, f"{summary}.", start_time, begin)
    if situation.is_made_again:  # the driver before it was asked to end when the job was suspended, not when it was created
        ended = start_time = situation.started
    wait = handover.wait_for_heads(situation, since=ended)
    if wait is not None:
        return _waiting(situation, reason, f"{summary} once {wait.message}.", start_time, wait.until)
    # The same text as for a RayJob that was just observed, so that observing it does not cause another status write.
    waiting = _waiting_for_nodes(number, Reason.STARTING)
    cluster = replace(waiting, message=startup.count_text(0, situation.options.num_nodes))
    return Decision(
        conditions=_open(situation, cluster, waiting),
        attempt=number,
        create_attempt=number,
        set_suspend={},
        start_time=situation.started,
        next_check=_earliest(situation, _active_deadline(situation)),
    )


def _with_refusal(situation: Situation, decision: Decision) -> Decision:
    """Add what the API server said when it did not let a RayJob be changed to the messages; the decision stands and is tried again."""
    refused = situation.observed.refused
    ended = (succeeded := decision.conditions.get(ConditionType.SUCCEEDED)) is not None and succeeded.status != UNKNOWN
    if refused is None or ended:  # what is stored of a finished job stays
        return decision
    text = failure.headline(refused)
    said = (ConditionType.SUSPENDED, ConditionType.RUNNING, ConditionType.SUCCEEDED)
    added = {
        type_: replace(value, message=f"{value.message} {text}".strip())
        for type_, value in decision.conditions.items()
        if type_ in said and value.reason is not Reason.NOT_SUSPENDED
    }
    return replace(decision, conditions={**decision.conditions, **added})


def _waiting_for_nodes(attempt: int, reason: Reason) -> ConditionValue:
    return ConditionValue(status=FALSE, reason=reason, message=f"Attempt {attempt} is waiting for its nodes.")


def _live(situation: Situation) -> Decision:
    """The RayJob of the current attempt is live."""
    hold = suspension.hold(situation)
    if hold is not None:
        return _held(situation, hold)
    if situation.child is not None and situation.child.deleting:
        message = f"Attempt {situation.attempt} starts again once RayJob {situation.child.name} is gone."
        return _waiting(situation, Reason.STARTING, message, situation.started)
    resume = suspension.resume(situation)
    until = startup.deadline(situation)
    if resume is not None:
        decision = _waiting(situation, Reason.STARTING, f"{resume.message}.", situation.started, resume.next_check)
        decision = replace(decision, set_suspend={resume.to_resume: False} if resume.to_resume else {})
        return replace(decision, next_check=_earliest(situation, decision.next_check, until))
    cluster = startup.cluster_ready(situation)
    child = situation.child
    if child is not None and child.deployment_status == "Running" and child.job_status == "RUNNING":
        message = f"Attempt {child.attempt} is training. {startup.head_note(situation)}".rstrip()
        running = ConditionValue(status=TRUE, reason=Reason.RUNNING, message=message)
    elif cluster.status is TRUE:
        running = ConditionValue(status=FALSE, reason=Reason.STARTING, message=f"The driver of attempt {situation.attempt} is starting.")
    else:
        running = _waiting_for_nodes(situation.attempt or 1, cluster.reason)
    return Decision(
        conditions=_open(situation, cluster, running),
        attempt=situation.attempt,
        set_suspend={},
        start_time=situation.started,
        next_check=_earliest(
            situation, until, startup.creation_check(situation), isolation.lost_at(situation), _active_deadline(situation)
        ),
    )


def _held(situation: Situation, hold: suspension.Hold) -> Decision:
    """The job must not hold devices: its deadlines stop, and restart when it resumes."""
    idle = ConditionValue(status=FALSE, reason=hold.reason, message=hold.message)
    conditions = _open(situation, replace(idle, message=""), idle)
    conditions[ConditionType.SUSPENDED] = replace(idle, status=TRUE if hold.is_released else FALSE)
    return Decision(
        conditions=conditions,
        attempt=situation.attempt,
        set_suspend={hold.to_suspend: True} if hold.to_suspend else {},
        delete_children=(hold.to_delete,) if hold.to_delete else (),
        start_time=None,
        next_check=situation.now if hold.is_unrecorded else hold.next_check,
    )


def _waiting(
    situation: Situation, reason: Reason, message: str, start_time: datetime | None, next_check: datetime | None = None
) -> Decision:
    """No driver is running; all conditions carry the same reason."""
    idle = ConditionValue(status=FALSE, reason=reason, message=message)
    # Running explains a restart; ClusterReady is about nodes only.
    cluster = replace(idle, message="") if reason is Reason.RESTARTING else idle
    conditions = _open(situation, cluster, idle)
    if situation.is_made_again:  # kept over as many passes as it takes: the missing RayJob was deleted by the operator
        message = "The job was resumed; its RayJob is made again."
        conditions[ConditionType.SUSPENDED] = ConditionValue(status=FALSE, reason=Reason.SUSPENDED, message=message)
    return Decision(
        conditions=conditions,
        attempt=situation.attempt,
        set_suspend={},
        start_time=start_time,
        next_check=_earliest(situation, next_check, _active_deadline(situation)),
    )


def _open(situation: Situation, cluster: ConditionValue, running: ConditionValue) -> dict[ConditionType, ConditionValue]:
    """Conditions of an unfinished job. Succeeded is the summary: it repeats the reason and message of Running."""
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
    """When activeDeadlineSeconds expires, also in the pass that starts the clock."""
    limit_s = situation.options.active_deadline_s
    if limit_s is None or situation.is_held or situation.attempt is None:
        return None
    return situation.started + timedelta(seconds=limit_s)


def _earliest(situation: Situation, *times: datetime | None) -> datetime | None:
    """The earliest of several times; now if it has passed, because the pass that starts a clock may find it expired."""
    return min((max(time, situation.now) for time in times if time is not None), default=None)
