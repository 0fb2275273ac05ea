"""Data types shared by all operator modules: what was observed about one RLJob, and what was decided.

::

    Kubernetes objects --views--> Observed --decide--> Decision --desired, kube--> children, one status, events
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
    """Identifies an RLJob."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The RLJob itself."""

    key: Key
    uid: str
    version: str
    """metadata.resourceVersion: a status derived from this view is only written over this very version."""
    generation: int
    created: datetime
    spec: Mapping[str, Any]
    """Raw JSON, with the defaults that the API server filled in."""
    status: Mapping[str, Any]
    """Raw JSON, as last written."""
    deleting: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildView:
    """A RayJob of the job, or one that only carries its label."""

    name: str
    attempt: int
    owner_uid: str | None
    """UID of its controller; we own the child only if this is the UID of the RLJob."""
    created: datetime
    deleting: bool
    suspend: bool
    """spec.suspend."""
    queue: str = ""
    """Kueue's queue, from the label that the operator or Kueue's webhook has put there."""
    queue_note: str = ""
    """What Kueue says of it while it holds it; empty: nothing is known."""
    has_workload: bool = False
    """Whether it is suspended and Kueue is known to have a Workload of it: with or without a queue, Kueue then owns spec.suspend."""
    is_elsewhere: bool = False
    """Whether spec.managedBy names another controller than KubeRay, as MultiKueue's: the pods are on another cluster."""
    deployment_status: str
    """status.jobDeploymentStatus: "" (new), Initializing, Running, Complete, Failed, ValidationFailed, Suspending, Suspended ..."""
    job_status: str
    """status.jobStatus: "", PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED."""
    reason: str
    """status.reason, for example AppFailed."""
    message: str
    """Digest of status.message: its first line, the tail of the driver's log and its termination message (see ``views.digest``)."""
    cluster_name: str
    """status.rayClusterName."""
    job_started: datetime | None
    """status.rayJobInfo.startTime: when the driver started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """A RayCluster of the job."""

    name: str
    replica_failure: str | None
    """Message of condition ReplicaFailure while it is True: KubeRay could not create or delete a pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodView:
    """A pod of the job: the head or a worker node."""

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
    unready_since: datetime | None = None
    """When it became not ready, by the clock of whoever reported that; None while it is ready."""
    is_node_silent: bool = False
    """Whether that was reported in place of the kubelet, because the node does not answer."""
    unschedulable: str | None
    """The scheduler's message while the pod cannot be scheduled."""
    scheduled_at: datetime | None = None
    """When it was bound to a node."""
    waiting: tuple[str, str, str] | None
    """Container, reason and message of a container that is waiting for other than normal startup, for example ImagePullBackOff."""
    creating_since: datetime | None = None
    """When it was bound to a node that has created none of its containers yet: it pulls images, mounts volumes, sets up the network."""
    warning: str | None = None
    """What the node says of that in its newest warning, once it has taken long."""
    terminated: tuple[str, str, int] | None
    """Container, reason and exit code of a container that terminated abnormally, now or in its previous run, for example OOMKilled.

    A pod that failed as a whole, for example Evicted, has an empty container name and exit code -1.
    """
    end_message: str = ""
    """Why a pod that failed as a whole did: the kubelet's words for an eviction."""
    terminated_at: datetime | None = None
    """When that container terminated."""
    deletion_time: datetime | None = None
    """When the pod should be gone: the deletion request plus its grace period."""
    disruption: str | None = None
    """Why the cluster ends the pod, from its condition DisruptionTarget: an eviction, a preemption, a taint, a lost node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """All inputs of a decision about one RLJob."""

    job: JobView
    checked: CheckedJob | SpecInvalidError
    """The spec with its plan, or all validation errors."""
    children: tuple[ChildView, ...]
    """RayJobs owned by the job, by attempt. A missing one was confirmed missing by the API server, not by a cache that may lag."""
    clusters: tuple[ClusterView, ...]
    pods: tuple[PodView, ...]
    spec_hashes: Mapping[str, str] = field(default_factory=dict)
    """Of the fields that cannot be changed, see :mod:`rljob_operator.frozen`; empty for an invalid spec."""
    runtime_image: str = ""
    """The operator's default."""
    runtime_ray_version: str = ""
    """That image's."""
    taken_name: str | None = None
    """Kind and name of an object with another owner that has the name of a child to create."""
    is_taken_one_leaving: bool = False
    """Whether that object is being deleted, as that of an earlier RLJob of the same name."""
    rejected: str | None = None
    """The API server's message when it rejected a child."""
    unavailable: str | None = None
    """Why a child could not be created for now: the API server or a webhook does not answer as it should."""
    refused: str | None = None
    """Which RayJob could not be suspended, resumed or deleted, and the API server's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionValue:
    """One condition without its timestamps."""

    status: ConditionStatus
    reason: Reason
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt failed."""

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
    """What to do and what to report. Actions first, then one status write, then events.

    The failure of an attempt is recorded (``failure``) in one pass and acted on (delete, next attempt) in a later one, which reads it
    from the status: evidence of a failure is never deleted before its explanation is stored.
    """

    conditions: Mapping[ConditionType, ConditionValue]
    """All condition types."""
    attempt: int | None
    """Current or latest attempt; None before the first."""
    create_attempt: int | None = None
    """Attempt whose children to create."""
    set_suspend: Mapping[str, bool]
    """RayJob name -> spec.suspend to patch."""
    delete_children: tuple[str, ...] = ()
    """RayJobs to delete."""
    delete_job: bool = False
    """Delete the RLJob itself: its TTL has expired."""
    failure: Failure | None = None
    """A failure that is not in the status yet."""
    start_time: datetime | None = None
    completion_time: datetime | None = None
    next_check: datetime | None = None
    """When to reconcile again even without an event: the nearest deadline."""
