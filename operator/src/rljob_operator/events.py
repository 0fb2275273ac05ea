"""Kubernetes events for status transitions that matter to users: at most one per condition, emitted after the status is written.

Each is a write, so what goes without saying is none: that a new job starts, or that its nodes are ready when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator.model import ConditionValue, Event
from rljob_operator.policies.situation import stored_conditions

PROBLEMS = (Reason.UNSCHEDULABLE, Reason.IMAGE_UNAVAILABLE, Reason.POD_FAILED, Reason.CHILD_NAME_TAKEN)
"""Why nodes are missing, where waiting may not help."""


def events(old_status: Mapping[str, Any], new_status: Mapping[str, Any]) -> tuple[Event, ...]:
    """Events for the transition between two statuses, in the order of the conditions; a changed message alone emits none."""
    old, new = stored_conditions(old_status), stored_conditions(new_status)
    runs = new[ConditionType.RUNNING].status is ConditionStatus.TRUE
    emitted = []
    for type_, rule in _RULES.items():
        before, after = old[type_], new[type_]
        if (before.status, before.reason) != (after.status, after.reason):
            event = rule(before, after)
            if event is not None and not (runs and event.reason == Reason.NODES_READY):  # a driver that runs says so, too
                emitted.append(event)
    return tuple(emitted)


def _event(value: ConditionValue, *, is_warning: bool, message: str = "") -> Event:
    return Event(is_warning=is_warning, reason=str(value.reason), message=value.message or message)


def _accepted(before: ConditionValue, after: ConditionValue) -> Event | None:
    if after.status is ConditionStatus.TRUE and before.status is ConditionStatus.UNKNOWN:
        return None  # that a spec is valid is no news
    return _event(after, is_warning=after.status is ConditionStatus.FALSE, message="The spec is valid and every process is placed.")


def _suspended(before: ConditionValue, after: ConditionValue) -> Event | None:
    if after.status is ConditionStatus.TRUE:
        return _event(after, is_warning=False)
    if before.status is ConditionStatus.TRUE:
        return Event(is_warning=False, reason=str(after.reason), message="The job is no longer suspended.")
    return None


def _cluster_ready(before: ConditionValue, after: ConditionValue) -> Event | None:
    if after.status is ConditionStatus.TRUE:
        return None if before.status is ConditionStatus.TRUE else _event(after, is_warning=False)
    return _event(after, is_warning=True) if after.reason in PROBLEMS else None


def _running(before: ConditionValue, after: ConditionValue) -> Event | None:
    if after.status is ConditionStatus.TRUE or (after.reason is Reason.STARTING and before.reason not in (*PROBLEMS, Reason.PENDING)):
        return _event(after, is_warning=False)
    return _event(after, is_warning=True) if after.reason is Reason.RESTARTING else None


def _succeeded(before: ConditionValue, after: ConditionValue) -> Event | None:
    return _event(after, is_warning=False) if after.status is ConditionStatus.TRUE else None


def _failed(before: ConditionValue, after: ConditionValue) -> Event | None:
    return _event(after, is_warning=True) if after.status is ConditionStatus.TRUE else None


_RULES: Mapping[ConditionType, Callable[[ConditionValue, ConditionValue], Event | None]] = {
    ConditionType.ACCEPTED: _accepted,
    ConditionType.SUSPENDED: _suspended,
    ConditionType.CLUSTER_READY: _cluster_ready,
    ConditionType.RUNNING: _running,
    ConditionType.SUCCEEDED: _succeeded,
    ConditionType.FAILED: _failed,
}
"""Which transitions of a condition emit an event."""
