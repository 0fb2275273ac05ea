"""Converts raw Kubernetes JSON to the views of :mod:`rljob_operator.model`: pure, tolerant of absent fields.

Views of all objects are kept in memory, so long texts are truncated here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rljob_api import termination
from rljob_api.naming import ATTEMPT_LABEL, QUEUE_LABEL
from rljob_operator import times
from rljob_operator.model import ChildView, ClusterView, JobView, Key, PodView

Raw = Mapping[str, Any]
EPOCH = datetime.fromtimestamp(0, UTC)
"""Placeholder for an absent creation time."""
MAX_TEXT = 600
"""Maximum length of a message, in characters."""
MAX_LOG = 2000
"""Maximum length of the tail of a driver's log, in characters."""
MAX_LOG_LINES = 25
"""Maximum length of the tail of a driver's log, in lines."""
MAX_TERMINATION_MESSAGE = 2400
"""Maximum length of the driver's termination message, in characters."""
KUBERAY = "ray.io/kuberay-operator"
"""Value of managedBy that means the same as none."""
STARTING = ("", "ContainerCreating", "PodInitializing")
"""Waiting reasons of normal container startup."""
_NOT_PRINTABLE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[^\S\n ]|[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def job_view(raw: Raw) -> JobView:
    """View of an RLJob."""
    metadata = _map(raw, "metadata")
    return JobView(
        key=Key(namespace=_text(metadata, "namespace"), name=_text(metadata, "name")),
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        generation=_int(metadata, "generation", 0),
        created=_created(metadata),
        spec=_map(raw, "spec"),
        status=_map(raw, "status"),
        deleting=bool(metadata.get("deletionTimestamp")),
    )


def child_view(raw: Raw) -> ChildView:
    """View of a RayJob."""
    metadata, status = _map(raw, "metadata"), _map(raw, "status")
    return ChildView(
        name=_text(metadata, "name"),
        attempt=_attempt(metadata),
        owner_uid=_controller(metadata),
        created=_created(metadata),
        deleting=bool(metadata.get("deletionTimestamp")),
        suspend=_map(raw, "spec").get("suspend") is True,
        queue=_text(_map(metadata, "labels"), QUEUE_LABEL),
        is_elsewhere=_text(_map(raw, "spec"), "managedBy") not in ("", KUBERAY),
        deployment_status=_text(status, "jobDeploymentStatus"),
        job_status=_text(status, "jobStatus"),
        reason=_text(status, "reason"),
        message=digest(_text(status, "message")),
        cluster_name=_text(status, "rayClusterName"),
        job_started=times.parse(_map(status, "rayJobInfo").get("startTime")),
    )


def cluster_view(raw: Raw) -> ClusterView:
    """View of a RayCluster."""
    found = _condition(_map(raw, "status"), "ReplicaFailure", "True")
    text = None if found is None else clean(_text(found, "message") or _text(found, "reason"), MAX_TEXT)
    return ClusterView(name=_text(_map(raw, "metadata"), "name"), replica_failure=text)


def pod_view(raw: Raw) -> PodView:
    """View of a pod created by KubeRay."""
    metadata, status = _map(raw, "metadata"), _map(raw, "status")
    labels = _map(metadata, "labels")
    terminated = _terminated(status)
    scheduled = _condition(status, "PodScheduled", "True")
    unready = _condition(status, "Ready", "False")
    unschedulable, disruption = _condition(status, "PodScheduled", "False"), _condition(status, "DisruptionTarget", "True")
    return PodView(
        name=_text(metadata, "name"),
        cluster=_text(labels, "ray.io/cluster"),
        group=_text(labels, "ray.io/group"),
        is_head=labels.get("ray.io/node-type") == "head",
        attempt=_attempt(metadata),
        created=_created(metadata),
        deleting=bool(metadata.get("deletionTimestamp")),
        phase=_text(status, "phase"),
        ready=_condition(status, "Ready", "True") is not None,
        unready_since=None if unready is None else times.parse(unready.get("lastTransitionTime")),
        is_node_silent=unready is not None and not _text(unready, "reason"),  # the kubelet gives one, the node controller does not
        unschedulable=clean(_text(unschedulable, "message") or _text(unschedulable, "reason"), MAX_TEXT) if unschedulable else None,
        scheduled_at=None if scheduled is None else times.parse(scheduled.get("lastTransitionTime")),
        waiting=_waiting(status),
        creating_since=times.parse(scheduled.get("lastTransitionTime")) if scheduled is not None and _is_creating(status) else None,
        terminated=None if terminated is None else terminated[:3],
        end_message=clean(_text(status, "message"), MAX_TEXT).rstrip(" .") if status.get("phase") == "Failed" else "",
        terminated_at=None if terminated is None else terminated[3],
        deletion_time=times.parse(metadata.get("deletionTimestamp")),
        disruption=None if disruption is None else _disruption(disruption),
    )


def _disruption(condition: Raw) -> str:
    return clean(": ".join(part for part in (_text(condition, "reason"), _text(condition, "message")) if part), MAX_TEXT)


def digest(log: str) -> str:
    """Digest of a RayJob's status.message: its first line, the tail of the log, and the driver's termination message as the last line."""
    reported = termination.decode(log)
    lines = [line for line in clean(log, len(log)).splitlines() if termination.MARKER not in line and line.strip()]
    kept = lines[-MAX_LOG_LINES:]
    while len(kept) > 1 and len("\n".join(kept)) > MAX_LOG:
        kept = kept[1:]
    first = [lines[0][:MAX_TEXT]] if lines and len(kept) < len(lines) else []
    parts = [*first, "\n".join(kept)[-MAX_LOG:]] if kept else []
    if reported is not None:
        message, worker = clean(reported.message, MAX_TERMINATION_MESSAGE), reported.worker and clean(reported.worker, 100)
        parts.append(termination.encode(replace(reported, message=message, worker=worker)))
    return "\n".join(parts)


def clean(text: str, limit: int) -> str:
    """Remove escape sequences and control characters other than line breaks, and shorten to ``limit`` characters."""
    return termination.shorten(_NOT_PRINTABLE.sub(" ", text).strip(), limit)


def _map(raw: Raw, key: str) -> Raw:
    value = raw.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(raw: Raw, key: str) -> list[Raw]:
    value = raw.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(raw: Raw, key: str) -> str:
    value = raw.get(key)
    return value if isinstance(value, str) else ""


def _int(raw: Raw, key: str, default: int) -> int:
    value = raw.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _created(metadata: Raw) -> datetime:
    return times.parse(metadata.get("creationTimestamp")) or EPOCH


def _attempt(metadata: Raw) -> int:
    label = _text(_map(metadata, "labels"), ATTEMPT_LABEL)
    return int(label) if label.isascii() and label.isdigit() and len(label) < 4 else 0


def _controller(metadata: Raw) -> str | None:
    owners = (owner for owner in _maps(metadata, "ownerReferences") if owner.get("controller") is True)
    return next((_text(owner, "uid") for owner in owners), None)


def _condition(status: Raw, type_: str, value: str) -> Raw | None:
    return next((c for c in _maps(status, "conditions") if c.get("type") == type_ and c.get("status") == value), None)


def _containers(status: Raw) -> Iterator[Raw]:
    yield from _maps(status, "initContainerStatuses")
    yield from _maps(status, "containerStatuses")


def _waiting(status: Raw) -> tuple[str, str, str] | None:
    for container in _containers(status):
        waiting = _map(_map(container, "state"), "waiting")
        reason = _text(waiting, "reason")
        if reason not in STARTING:
            # The kubelet alternates between ErrImagePull and ImagePullBackOff; both contain the same error text.
            message = _text(waiting, "message")
            message = message.partition("ErrImagePull: ")[2] or message
            return _text(container, "name"), reason[:100], clean(message, MAX_TEXT)
    return None


def _is_creating(status: Raw) -> bool:
    """Whether none of its containers has been created, for no other reason than normal startup; the kubelet lists them soon or late."""
    states = [_map(container, "state") for container in _containers(status)]
    return (
        status.get("phase") == "Pending"
        and all(_text(_map(state, "waiting"), "reason") in STARTING for state in states)
        and not any("running" in state or "terminated" in state for state in states)
    )


def _terminated(status: Raw) -> tuple[str, str, int, datetime | None] | None:
    """Container, reason, exit code and time of the most significant abnormal termination: OOMKilled if any, else the first."""
    found = []
    for container in _containers(status):
        for state in ("state", "lastState"):
            end = _map(_map(container, state), "terminated")
            reason, code = _text(end, "reason"), _int(end, "exitCode", 0)
            if code != 0 or reason == "OOMKilled":
                found.append((_text(container, "name"), reason[:100] or "Error", code, times.parse(end.get("finishedAt"))))
    found.sort(key=lambda end: end[1] != "OOMKilled")
    if not found and status.get("phase") == "Failed":
        return "", _text(status, "reason")[:100] or "Failed", -1, None
    return found[0] if found else None
