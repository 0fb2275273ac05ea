"""Conditions of an RLJob: what is true of it, and why.

All types are present from the first status on, ``Unknown`` until known. ``Succeeded`` is the summary: Unknown while the job
is not finished, and its reason is what ``kubectl get rlj`` shows as STATUS.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import SpecModel


class ConditionType(StrEnum):
    """What a condition is about."""

    ACCEPTED = "Accepted"
    """The spec is valid and placed."""
    SUSPENDED = "Suspended"
    """The job holds no devices because it was told so."""
    CLUSTER_READY = "ClusterReady"
    """All nodes of the current attempt are there and hold the devices the plan counts on."""
    RUNNING = "Running"
    """Workers are placed and training steps are made."""
    SUCCEEDED = "Succeeded"
    """True when all steps are done, False when the job has failed for good, Unknown before."""
    FAILED = "Failed"
    """The job has failed for good."""


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    """It holds."""
    FALSE = "False"
    """It does not hold."""
    UNKNOWN = "Unknown"
    """Not known yet."""


class Reason(StrEnum):
    """Why a condition is as it is; one CamelCase word that tools may rely on."""

    PENDING = "Pending"
    """Not looked at yet."""
    SPEC_VALID = "SpecValid"
    """Every check passed and every process has a place."""
    SPEC_INVALID = "SpecInvalid"
    """A check failed; the message lists every problem with its path."""
    SUSPENDED = "Suspended"
    """spec.suspend is true."""
    NOT_SUSPENDED = "NotSuspended"
    """spec.suspend is false."""
    QUEUED = "Queued"
    """Waits for quota in its queue."""
    STARTING = "Starting"
    """Nodes or workers of the current attempt are starting."""
    NODES_READY = "NodesReady"
    """All nodes are there."""
    NODES_MISMATCH = "NodesMismatch"
    """A node has other labels or devices than the plan counts on."""
    STARTUP_DEADLINE_EXCEEDED = "StartupDeadlineExceeded"
    """Workers were not ready within startupDeadlineSeconds."""
    RUNNING = "Running"
    """Training steps are made."""
    RESTARTING = "Restarting"
    """An attempt failed and another one follows."""
    COMPLETED = "Completed"
    """All steps are done."""
    ACTIVE_DEADLINE_EXCEEDED = "ActiveDeadlineExceeded"
    """The job ran longer than activeDeadlineSeconds."""
    WORKER_FAILED = "WorkerFailed"
    """A worker raised an error; the message carries it."""
    WORKER_LOST = "WorkerLost"
    """A worker or its pod ended without an error of its own."""
    OUT_OF_MEMORY = "OutOfMemory"
    """A pod was killed for its memory use."""
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    """The attempt failed and failurePolicy.maxRestarts allows no further one."""


class Condition(SpecModel):
    """One condition, as the Kubernetes API conventions define it."""

    type: ConditionType
    """What it is about."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Reason
    """Why, as one word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, in a sentence for people."""
    last_transition_time: Annotated[str, Field(max_length=40)]
    """When status last changed, RFC 3339 in UTC."""
    observed_generation: Annotated[int, Field(ge=0)]
    """metadata.generation that this was computed from."""
