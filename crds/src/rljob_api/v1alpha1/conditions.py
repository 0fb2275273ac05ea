"""Conditions of an RLJob: what is true of it, and why.

All types are present from the first status on, ``Unknown`` until known. ``Succeeded`` is the summary: Unknown while the job
is not finished, and its reason is what ``kubectl get rlj`` shows as STATUS.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import SpecModel
from rljob_api.vocabulary import Reason


class ConditionType(StrEnum):
    """What a condition is about."""

    ACCEPTED = "Accepted"
    """The spec is valid and placed."""
    SUSPENDED = "Suspended"
    """The job holds no devices because it is suspended."""
    CLUSTER_READY = "ClusterReady"
    """All nodes of the current attempt are ready and have the devices that the plan requires."""
    RUNNING = "Running"
    """Workers are placed, and the driver is training."""
    SUCCEEDED = "Succeeded"
    """True when all steps are done, False when the job has failed permanently, Unknown before."""
    FAILED = "Failed"
    """The job has failed permanently."""


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    """It holds."""
    FALSE = "False"
    """It does not hold."""
    UNKNOWN = "Unknown"
    """Not known yet."""


class Condition(SpecModel):
    """One condition, as the Kubernetes API conventions define it."""

    type: ConditionType
    """What it is about."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Reason
    """Why, as one word."""
    message: Annotated[str, Field(max_length=4096)] = ""
    """Why, in a sentence."""
    last_transition_time: Annotated[str, Field(max_length=40)]
    """When status last changed, RFC 3339 in UTC."""
    observed_generation: Annotated[int, Field(ge=0)]
    """metadata.generation that this was computed from."""
