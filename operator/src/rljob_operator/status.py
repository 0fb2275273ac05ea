"""A decision as the status of an RLJob. The same decision about the same observation gives the same bytes; no floats, below 10 kB.

``progress`` is the driver's and is never rendered: server-side apply leaves it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rljob_api import failure as words
from rljob_api.naming import rayjob_name
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator import times
from rljob_operator.model import Decision, Observed
from rljob_operator.policies.admission import is_managed
from rljob_operator.policies.situation import Recorded, Situation, assess, is_live

MAX_STATUS_BYTES = 9400
"""Size of what is rendered; the driver's progress comes on top."""
MESSAGE_LIMITS = (4096, 2600, 1800, 1200, 800, 400, 200, 100)
"""Characters per message: the first of these with which the status is small enough is used."""
PROGRESS = "progress"


def render(observed: Observed, decision: Decision, now: datetime) -> dict[str, Any]:
    """The whole status but progress, as camelCase JSON."""
    situation = assess(observed, now)
    job = situation.job
    stored = {key: value for key, value in job.status.items() if key != PROGRESS}
    if job.deleting or not is_managed(job):
        return stored
    if situation.is_finished:
        # All that is said about a finished job was said at its end; the pods that vanish now are no news.
        end = decision.completion_time or situation.now
        stored |= {"observedGeneration": job.generation, "conditions": _conditions(situation, decision), "completionTime": times.text(end)}
        return stored
    attempt = decision.attempt
    status = {
        "observedGeneration": job.generation,
        "conditions": _conditions(situation, decision),
        "attempt": attempt,
        "rayJobName": None if attempt is None else rayjob_name(job.key.name, attempt),
        "startTime": _time(decision.start_time),
        "completionTime": _time(decision.completion_time),
        **_nodes(situation, decision),
        "lastFailure": _last_failure(situation, decision),
    }
    return _fit({key: value for key, value in status.items() if value is not None})


def changed(current: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Whether a rendered status says something else than the stored one; progress does not count."""
    return {k: v for k, v in current.items() if k != PROGRESS} != {k: v for k, v in desired.items() if k != PROGRESS}


def _conditions(situation: Situation, decision: Decision) -> list[dict[str, Any]]:
    conditions = situation.job.status.get("conditions")
    before = {str(c.get("type")): c for c in conditions if isinstance(c, Mapping)} if isinstance(conditions, list | tuple) else {}
    rendered = []
    for type_ in ConditionType:
        value = decision.conditions[type_]
        old = before.get(type_, {})
        since = times.parse(old.get("lastTransitionTime")) if old.get("status") == value.status else None
        rendered.append(
            {
                "type": str(type_),
                "status": str(value.status),
                "reason": str(value.reason),
                "message": value.message,
                "lastTransitionTime": times.text(since or situation.now),
                "observedGeneration": situation.job.generation,
            }
        )
    return rendered


def _nodes(situation: Situation, decision: Decision) -> dict[str, Any]:
    """Nodes count while the current attempt lives; those of an attempt that just failed for good are being given back."""
    child = situation.child
    is_counted = child is not None and is_live(child) and decision.completion_time is None
    groups = []
    total = 0
    for group in situation.options.groups:
        ready = min(situation.ready_nodes(group.name), group.nodes) if is_counted else 0
        total += ready
        groups.append({"name": group.name, "desired": group.nodes, "ready": ready, "rankRange": group.rank_range})
    return {"nodes": f"{total}/{situation.options.num_nodes}", "nodeGroups": groups}


def _last_failure(situation: Situation, decision: Decision) -> dict[str, Any] | None:
    """Of a job that succeeded no failure matters any more."""
    if decision.conditions[ConditionType.SUCCEEDED].reason is Reason.COMPLETED:
        return None
    recorded = situation.last_failure
    if decision.failure is not None:
        recorded = Recorded(failure=decision.failure, time=situation.now)
    if recorded is None:
        return None
    failure = recorded.failure
    entry = {
        "reason": str(failure.reason),
        "message": failure.message,
        "podName": failure.pod_name,
        "exitCode": failure.exit_code,
        "attempt": failure.attempt,
        "time": times.text(recorded.time),
    }
    return {key: value for key, value in entry.items() if value is not None}


def _time(time: datetime | None) -> str | None:
    return None if time is None else times.text(time)


def _fit(status: dict[str, Any]) -> dict[str, Any]:
    """Shorten messages, the longest first, until the status is small enough."""
    for limit in MESSAGE_LIMITS:
        for entry in (*status["conditions"], status.get("lastFailure", {"message": ""})):
            entry["message"] = words.shorten(entry["message"], limit)
        if len(json.dumps(status, ensure_ascii=False).encode()) <= MAX_STATUS_BYTES:
            break
    return status
