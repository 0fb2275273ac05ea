"""Renders a decision as the status of an RLJob: deterministic to the byte, no floats, below 10 kB.

``progress`` belongs to the driver and is never rendered: server-side apply leaves it as it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from rljob_api import termination
from rljob_api.naming import rayjob_name
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.vocabulary import Reason
from rljob_operator import times
from rljob_operator.model import Decision, Observed
from rljob_operator.policies import failure
from rljob_operator.policies.admission import is_managed
from rljob_operator.policies.situation import Situation, assess, is_live, known_reason

MAX_STATUS_BYTES = 9400
"""Maximum size of the rendered part; the driver's progress comes on top."""
MESSAGE_LIMITS = (4096, 2600, 1800, 1200, 800, 400, 200, 100)
"""Maximum message lengths to try, in characters, until the status is small enough."""
PROGRESS = "progress"


def render(observed: Observed, decision: Decision, now: datetime) -> dict[str, Any]:
    """Render the whole status except progress, as camelCase JSON."""
    situation = assess(observed, now)
    job = situation.job
    stored = {key: value for key, value in job.status.items() if key != PROGRESS}
    if job.deleting or not is_managed(job):
        return stored
    if situation.is_finished:
        # The status of a finished job is final; pods that disappear now do not change it.
        end = decision.completion_time or situation.now
        stored |= {"observedGeneration": job.generation, "conditions": _conditions(situation, decision), "completionTime": times.text(end)}
        return stored
    attempt = decision.attempt
    status = {
        "observedGeneration": job.generation,
        "conditions": _conditions(situation, decision),
        "attempt": attempt,
        "disruptions": _disruptions(situation, decision),
        "rayJobName": None if attempt is None else rayjob_name(job.key.name, attempt),
        **_pinned(situation, attempt),
        "headPod": _head_pod(situation, decision),
        "startTime": _time(decision.start_time),
        "completionTime": _time(decision.completion_time),
        **_nodes(situation, decision),
        "lastFailure": _last_failure(situation, decision),
    }
    return _fit({key: value for key, value in status.items() if value is not None})


def changed(current: Mapping[str, Any], desired: Mapping[str, Any]) -> bool:
    """Whether a rendered status differs from the stored one, ignoring progress."""
    return {k: v for k, v in current.items() if k != PROGRESS} != {k: v for k, v in desired.items() if k != PROGRESS}


def _conditions(situation: Situation, decision: Decision) -> list[dict[str, Any]]:
    conditions = situation.job.status.get("conditions")
    before = {str(c.get("type")): c for c in conditions if isinstance(c, Mapping)} if isinstance(conditions, list | tuple) else {}
    rendered: list[dict[str, Any]] = []
    for type_ in ConditionType:
        value = decision.conditions[type_]
        old = before.get(type_, {})
        if situation.is_finished and old and known_reason(old.get("reason")) is None:
            rendered.append({**old, "observedGeneration": situation.job.generation})
            continue
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
    """Node counts of the current attempt while it is live; those of an attempt that just failed permanently are being released."""
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
    """The latest failure; none for a job that succeeded."""
    if decision.conditions[ConditionType.SUCCEEDED].reason is Reason.COMPLETED:
        return None
    recorded = situation.last_failure
    if decision.failure is not None:
        recorded = situation.new_failure(decision.failure)
    if recorded is None:
        return None
    last = recorded.failure
    entry = {
        "reason": str(last.reason),
        "message": last.message,
        "podName": last.pod_name,
        "exitCode": last.exit_code,
        "attempt": last.attempt,
        "time": times.text(recorded.time),
    }
    return {key: value for key, value in entry.items() if value is not None}


def _disruptions(situation: Situation, decision: Decision) -> int | None:
    """Attempts that ended by a disruption; absent while there is none."""
    new = decision.failure is not None and decision.failure.reason.is_disruption
    return situation.disruptions + new or None


def _head_pod(situation: Situation, decision: Decision) -> str | None:
    """The head pod that the driver started in, for as long as it runs."""
    child = situation.child
    if child is None or decision.failure is not None or decision.attempt != situation.attempt or not failure.runs_driver(child):
        return None
    return situation.driver_pod or next((pod.name for pod in situation.pods if pod.is_head), None)


def _pinned(situation: Situation, attempt: int | None) -> dict[str, Any]:
    """What all attempts run: image, Ray version and spec of the first one."""
    if attempt is None:
        return {}
    status, spec, observed = situation.job.status, situation.job.spec, situation.observed
    return {
        "image": status.get("image") or spec.get("image") or observed.runtime_image or None,
        "rayVersion": status.get("rayVersion") or spec.get("rayVersion") or observed.runtime_ray_version or None,
        "specHashes": status.get("specHashes") or dict(observed.spec_hashes) or None,
    }


def _time(time: datetime | None) -> str | None:
    return None if time is None else times.text(time)


def _fit(status: dict[str, Any]) -> dict[str, Any]:
    """Shorten messages, longest first, until the status is small enough."""
    for limit in MESSAGE_LIMITS:
        for entry in (*status["conditions"], status.get("lastFailure", {"message": ""})):
            entry["message"] = termination.shorten(entry["message"], limit)
        if len(json.dumps(status, ensure_ascii=False).encode()) <= MAX_STATUS_BYTES:
            break
    return status
