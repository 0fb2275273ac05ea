"""The operator's nouns: what was observed of one RLJob, and what was decided about it. Data only.

::

    Kubernetes objects --views--> Observed --decide--> Decision --desired, kube--> children, one status, events
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_api.validation import CheckedJob
from rljob_api.vocabulary import Reason

Manifest = dict[str, Any]
"""A Kubernetes object as plain JSON."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Key:
    """Which RLJob."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The RLJob itself."""

    key: Key
    uid: str
    generation: int
    created: datetime
    spec: Mapping[str, Any]
    """Raw, defaults filled in by the API server."""
    status: Mapping[str, Any]
    """Raw, as last written."""
    deleting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildView:
    """A RayJob that carries the job's label."""

    name: str
    attempt: int
    owner_uid: str | None
    """UID of its controller; a child is ours only when this is the RLJob's."""
    created: datetime
    deleting: bool
    suspend: bool
    """spec.suspend."""
    deployment_status: str
    """status.jobDeploymentStatus: "" (new), Initializing, Running, Complete, Failed, ValidationFailed, Suspending, Suspended ..."""
    job_status: str
    """status.jobStatus: "", PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED."""
    reason: str
    """status.reason, for example AppFailed."""
    message: str
    """Digest of status.message: its first line, the driver's last word and the end of its log (see ``views.digest``)."""
    cluster_name: str
    """status.rayClusterName."""
    job_started: datetime | None
    """status.rayJobInfo.startTime: when the driver was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A RayCluster of the job."""

    name: str
    replica_failure: str | None
    """Message of the condition ReplicaFailure while it is True: KubeRay could not create or delete a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of the job: the head or a node."""

    name: str
    cluster: str
    group: str
    """Node group; "headgroup" for the head."""
    is_head: bool
    attempt: int
    created: datetime
    deleting: bool
    phase: str
    ready: bool
    unschedulable: str | None
    """The scheduler's message while it finds no node."""
    waiting: tuple[str, str, str] | None
    """Container, reason and message of a container that waits for more than its start, for example ImagePullBackOff."""
    terminated: tuple[str, str, int] | None
    """Container, reason and exit code of a container that ended other than well, its last run included, for example OOMKilled.

    A pod that failed as a whole, for example Evicted, has an empty container and the exit code -1.
    """
    terminated_at: datetime | None = None
    """When that container ended."""
    deletion_time: datetime | None = None
    """When the pod is to be gone: the request to delete it plus its grace period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that decisions about one RLJob are made from."""

    job: JobView
    checked: CheckedJob | SpecInvalidError
    """The plan of the spec, or every problem of it."""
    children: tuple[ChildView, ...]
    """RayJobs that the job owns, by attempt. That one is absent here was confirmed by the API server, not by a cache that may lag."""
    clusters: tuple[ClusterView, ...]
    pods: tuple[PodView, ...]
    taken_name: str | None = None
    """Name of a foreign object in the place of a child that was to be made."""
    rejected: str | None = None
    """What the API server said when it refused a child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionValue:
    """One condition without its times."""

    status: ConditionStatus
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How an attempt ended that did not succeed."""

    attempt: int
    reason: Reason
    message: str
    pod_name: str | None = None
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A Kubernetes event about the RLJob."""

    is_warning: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do and what to say. Actions first, then one status write, then events.

    The end of an attempt is decided (``failure``) in one pass and acted on (delete, next attempt) only in a later one, which finds it
    recorded in the status: so nothing that explains an end is deleted before its explanation is stored.
    """

    conditions: Mapping[ConditionType, ConditionValue]
    """All six types."""
    attempt: int | None
    """Current or last attempt; None before the first."""
    create_attempt: int | None = None
    """Make the children of this attempt."""
    set_suspend: Mapping[str, bool]
    """RayJob name -> spec.suspend to patch."""
    delete_children: tuple[str, ...] = ()
    """RayJobs to delete."""
    delete_job: bool = False
    """The RLJob itself: its time to live is over."""
    failure: Failure | None = None
    """An end of an attempt that the status does not hold yet."""
    start_time: datetime | None = None
    completion_time: datetime | None = None
    next_check: datetime | None = None
    """When to look again even if nothing happens: the nearest deadline."""
