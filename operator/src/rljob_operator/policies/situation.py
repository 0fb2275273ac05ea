"""The input of all policies: one observation, interpreted once.

::

    Observed, now --assess--> Situation --policies--> Decision
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rljob_api.errors import SpecInvalidError
from rljob_api.naming import rayjob_name
from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator import frozen, times
from rljob_operator.model import ChildView, ConditionValue, Failure, JobView, Observed, PodView
from rljob_operator.policies import options

MAX_POD_PREFIX = 50
"""Characters of a RayCluster's name in the names of its pods."""
MAX_ATTEMPT = 99
"""Attempt numbers have at most two digits; see :mod:`rljob_api.naming`."""
ENDED = ("Complete", "Failed", "ValidationFailed")
"""Terminal states of a RayJob."""
_REASONS = {str(reason): reason for reason in Reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedFailure:
    """A failure as stored in the status."""

    failure: Failure
    time: datetime
    disruptions: int
    """Attempts that ended by a disruption, this one included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One RLJob at one point in time."""

    observed: Observed
    now: datetime
    """Whole seconds, so that a time is the same before and after it is stored."""
    options: options.Options
    stored: Mapping[ConditionType, ConditionValue]
    """Conditions as last written."""
    attempt: int | None
    """Current or latest attempt; None before the first."""
    child: ChildView | None
    """Its RayJob."""
    orphans: tuple[ChildView, ...]
    """Live RayJobs of other attempts; normally empty."""
    pods: tuple[PodView, ...]
    """Pods of the RayJob's current cluster, by name."""
    driver_pod: str | None
    """Head pod that ran the driver when the status was last written."""
    last_failure: RecordedFailure | None
    start_time: datetime | None
    completion_time: datetime | None

    @property
    def job(self) -> JobView:
        """The RLJob."""
        return self.observed.job

    @property
    def is_spec_valid(self) -> bool:
        """Whether children may be created from the spec."""
        return not isinstance(self.observed.checked, SpecInvalidError)

    @property
    def changed_fields(self) -> tuple[str, ...]:
        """Fields that cannot be changed and were, since the first attempt."""
        before, now = self.job.status.get("specHashes"), self.observed.spec_hashes
        return frozen.changed(before, now) if isinstance(before, Mapping) and before and now and self.attempt is not None else ()

    @property
    def is_finished(self) -> bool:
        """Whether the stored status is final: the job succeeded or failed."""
        return self.stored[ConditionType.SUCCEEDED].status is not ConditionStatus.UNKNOWN

    @property
    def is_failure_recorded(self) -> bool:
        """Whether the status holds the failure of the current attempt."""
        return self.last_failure is not None and self.last_failure.failure.attempt == self.attempt

    @property
    def disruptions(self) -> int:
        """Attempts recorded as ended by a disruption."""
        return _number(self.job.status.get("disruptions"))

    def new_failure(self, failure: Failure) -> RecordedFailure:
        """A failure that this pass found, as it will be recorded."""
        return RecordedFailure(failure=failure, time=self.now, disruptions=self.disruptions + failure.reason.is_disruption)

    @property
    def live_child(self) -> ChildView | None:
        """The RayJob of the current attempt while it may hold pods."""
        return self.child if self.child is not None and is_live(self.child) else None

    @property
    def is_held(self) -> bool:
        """Whether the job must not hold devices now; deadlines are paused. A RayJob that is going away waits in no queue."""
        child = self.live_child
        return self.options.suspend or (self.is_queued and child is not None and child.suspend and not child.deleting)

    @property
    def is_queued(self) -> bool:
        """Whether Kueue owns the RayJob's spec.suspend: of spec.queue, or of a namespace whose jobs all go through Kueue."""
        return self.options.is_queued or (self.child is not None and (self.child.queue != "" or self.child.has_workload))

    @property
    def is_parked(self) -> bool:
        """Whether the job is suspended, or was when last looked at: a RayJob that is missing then is made again for the same attempt."""
        return self.options.suspend or self.stored[ConditionType.SUSPENDED].reason is Reason.SUSPENDED

    @property
    def is_made_again(self) -> bool:
        """Whether the job was resumed, and its RayJob, deleted while it was suspended, is not there again yet."""
        is_gone = self.child is None or self.child.deleting
        return self.is_parked and is_gone and not self.options.suspend

    @property
    def started(self) -> datetime:
        """When the job started or resumed; now, if this pass starts or resumes it.

        An operator that died between creating a RayJob and writing the status leaves no start time; the RayJob's creation time then
        stands in for it, unless Kueue may have held the RayJob since.
        """
        is_unrecorded = self.child is not None and self.job.status.get("attempt") != self.attempt and not self.is_queued
        return self.start_time or (self.child.created if self.child is not None and is_unrecorded and not self.child.suspend else self.now)

    def ready_nodes(self, group: str) -> int:
        """Number of ready pods of a node group."""
        return sum(pod.ready and not pod.deleting and not pod.is_head and pod.group == group for pod in self.pods)

    @property
    def num_ready(self) -> int:
        """Number of ready nodes, capped at the planned number of each group."""
        return sum(min(self.ready_nodes(group.name), group.nodes) for group in self.options.groups)


def is_live(child: ChildView) -> bool:
    """Whether a RayJob may have pods: it has not ended, or KubeRay rejected it after creating its cluster, which then stays."""
    return child.deployment_status not in ENDED or (child.deployment_status == "ValidationFailed" and child.cluster_name != "")


def assess(observed: Observed, now: datetime) -> Situation:
    """Interpret an observation; children with other owners or other names than the derived ones are ignored."""
    job = observed.job
    children = {child.attempt: child for child in observed.children if _is_ours(job, child)}
    attempt = max([*children, _number(job.status.get("attempt"))], default=0) or None
    child = None if attempt is None else children.get(attempt)
    return Situation(
        observed=observed,
        now=times.whole_seconds(now),
        options=options.read(job.spec),
        stored=stored_conditions(job.status),
        attempt=attempt,
        child=child,
        orphans=tuple(c for number, c in sorted(children.items()) if number != attempt and is_live(c)),
        pods=_pods(observed, attempt, child),
        driver_pod=_driver_pod(job.status, attempt, child),
        last_failure=_last_failure(job.status, times.whole_seconds(now)),
        start_time=times.parse(job.status.get("startTime")),
        completion_time=times.parse(job.status.get("completionTime")),
    )


def stored_conditions(status: Mapping[str, Any]) -> dict[ConditionType, ConditionValue]:
    """All conditions as stored; Unknown where one is missing or not understood.

    A job that has ended has ended for whatever reason: one that only a newer operator knows counts as ``DriverFailed``.
    """
    found = dict.fromkeys(ConditionType, ConditionValue(status=ConditionStatus.UNKNOWN, reason=Reason.PENDING))
    conditions = status.get("conditions")
    for item in conditions if isinstance(conditions, list | tuple) else ():
        try:
            type_, state = ConditionType(item["type"]), ConditionStatus(item["status"])
            reason, message = known_reason(item["reason"]), str(item.get("message") or "")
        except (KeyError, TypeError, ValueError):
            continue
        if reason is None and type_ in (ConditionType.SUCCEEDED, ConditionType.FAILED):
            reason = Reason.DRIVER_FAILED if state is not ConditionStatus.UNKNOWN else Reason.PENDING
        if reason is not None:
            found[type_] = ConditionValue(status=state, reason=reason, message=message)
    return found


def known_reason(stored: object) -> Reason | None:
    """A reason of a status; None for one of a newer operator."""
    return _REASONS.get(str(stored))


def _is_ours(job: JobView, child: ChildView) -> bool:
    if child.owner_uid != job.uid or not 1 <= child.attempt <= MAX_ATTEMPT:
        return False
    return child.name == rayjob_name(job.key.name, child.attempt)


def _driver_pod(status: Mapping[str, Any], attempt: int | None, child: ChildView | None) -> str | None:
    """The head pod that was last seen, if it is one of the RayJob's present RayCluster.

    After a preemption by Kueue the same RayJob has another cluster, whose head replaces no driver. KubeRay 1.6 names a head after at most
    50 characters of its cluster's name (``utils.PodName``).
    """
    name = status.get("headPod")
    if not isinstance(name, str) or _number(status.get("attempt")) != attempt:
        return None
    is_of_another = child is not None and child.cluster_name and not name.startswith(f"{child.cluster_name[:MAX_POD_PREFIX]}-")
    return None if is_of_another else name


def _number(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ATTEMPT else 0


def _pods(observed: Observed, attempt: int | None, child: ChildView | None) -> tuple[PodView, ...]:
    def belongs(pod: PodView) -> bool:
        return pod.attempt == attempt and (child is None or not child.cluster_name or pod.cluster == child.cluster_name)

    return tuple(sorted((pod for pod in observed.pods if belongs(pod)), key=lambda pod: pod.name))


def _last_failure(status: Mapping[str, Any], now: datetime) -> RecordedFailure | None:
    """The stored failure; one timed by a clock that was ahead counts as of now, or the backoff would wait for that clock."""
    raw = status.get("lastFailure")
    if not isinstance(raw, Mapping):
        return None
    attempt, time = _number(raw.get("attempt")), times.parse(raw.get("time"))
    if not attempt or time is None:
        return None
    pod_name, exit_code = raw.get("podName"), raw.get("exitCode")
    failure = Failure(
        attempt=attempt,
        reason=known_reason(raw.get("reason")) or Reason.DRIVER_FAILED,
        message=str(raw.get("message") or ""),
        pod_name=pod_name if isinstance(pod_name, str) else None,
        exit_code=exit_code if isinstance(exit_code, int) else None,
    )
    return RecordedFailure(failure=failure, time=min(time, now), disruptions=_number(status.get("disruptions")))
