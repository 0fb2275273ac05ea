"""Status of an RLJob, written by the operator; progress is written by the job itself. Never a source of truth.

No floats: numbers for people are text, so that writing them twice gives the same bytes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import Label, ShortText, SpecModel, Text
from rljob_api.v1alpha1.conditions import Condition

NumberText = Annotated[str, Field(max_length=32, pattern=r"^-?[0-9]+(\.[0-9]+)?$")]
"""A decimal number as text."""
Time = Annotated[str, Field(max_length=40)]
"""RFC 3339 in UTC."""


class NodeGroupStatus(SpecModel):
    """Nodes of one group."""

    name: Label
    """Name of the node group."""
    desired: Annotated[int, Field(ge=0)]
    """Nodes it should have."""
    ready: Annotated[int, Field(ge=0)]
    """Nodes that are ready."""
    rank_range: Annotated[str, Field(max_length=32)]
    """Ranks of its nodes, for example 0-3."""


class StepMilliseconds(SpecModel):
    """Milliseconds of a typical step by phase: medians of the attempt's last steps, without its first one."""

    step: Annotated[int, Field(ge=1)]
    """The whole step; what is not in a phase below is checkpoints and the driver."""
    generate: Annotated[int, Field(ge=0)] = 0
    """Waiting for engines to generate."""
    reward: Annotated[int, Field(ge=0)] = 0
    """Waiting for rewards."""
    score: Annotated[int, Field(ge=0)] = 0
    """Passes that only score: reference, proximal policy, and critic."""
    train: Annotated[int, Field(ge=0)] = 0
    """Forward and backward passes and the optimizer."""
    sync: Annotated[int, Field(ge=0)] = 0
    """Publishing weights to the engines."""
    stall: Annotated[int, Field(ge=0)] = 0
    """Part of sync in which engines did not generate."""
    offload: Annotated[int, Field(ge=0)] = 0
    """Offloading and loading the state of roles that share devices; partly concurrent with other phases."""


class Progress(SpecModel):
    """How far training is; written by the job itself, best effort."""

    attempt: Annotated[int, Field(ge=0)] = 0
    """Attempt that wrote this."""
    step: Annotated[int, Field(ge=0)] = 0
    """Completed training steps."""
    total_steps: Annotated[int, Field(ge=0)] = 0
    """Total training steps."""
    weight_version: Annotated[int, Field(ge=0)] = 0
    """Version of the weights that the engines hold."""
    reward: NumberText | None = None
    """Mean reward of the last step."""
    pass_rate: NumberText | None = None
    """Share of solved responses of the last step."""
    tokens_per_second: NumberText | None = None
    """Response tokens per second of the last step."""
    step_milliseconds: StepMilliseconds | None = None
    """Where a step's time goes, from the attempt's second step; rljob describe derives from it what would make steps shorter."""
    last_update_time: Time | None = None
    """When this was written."""


class LastFailure(SpecModel):
    """Why the last attempt ended."""

    reason: ShortText
    """One word; see the reasons of conditions."""
    message: Text = ""
    """The error itself, shortened."""
    pod_name: ShortText | None = None
    """Pod that failed."""
    exit_code: int | None = None
    """Exit code of its container."""
    attempt: Annotated[int, Field(ge=1)]
    """Attempt that failed."""
    time: Time
    """When this was recorded; a restart waits its backoff from here."""


class RLJobStatus(SpecModel):
    """Observed state of the job."""

    observed_generation: Annotated[int, Field(ge=0)] | None = None
    """metadata.generation that the status was computed from."""
    conditions: tuple[Condition, ...] = Field(default=(), max_length=16)
    """What is true of the job, one entry per type."""
    attempt: Annotated[int, Field(ge=0)] | None = None
    """Number of the current or last attempt, counted from 1."""
    disruptions: Annotated[int, Field(ge=0)] | None = None
    """How many attempts ended as Evicted."""
    ray_job_name: ShortText | None = None
    """RayJob of that attempt."""
    image: Text | None = None
    """Image of all attempts: from the spec, or the operator's default when the first attempt was created."""
    ray_version: ShortText | None = None
    """Ray version in that image."""
    spec_hashes: dict[ShortText, ShortText] | None = Field(default=None, max_length=64)
    """Hashes of the immutable fields at the first attempt, because the API server does not detect every change."""
    head_pod: ShortText | None = None
    """Pod that runs the driver of that attempt."""
    start_time: Time | None = None
    """When the first attempt since the last suspension was created; activeDeadlineSeconds counts from here."""
    completion_time: Time | None = None
    """When the job succeeded or failed permanently; ttlSecondsAfterFinished counts from here."""
    nodes: Annotated[str, Field(max_length=32)] | None = None
    """Ready and desired nodes over all groups, for example 3/4."""
    node_groups: tuple[NodeGroupStatus, ...] = Field(default=(), max_length=16)
    """Nodes by group."""
    progress: Progress | None = None
    """How far training is."""
    last_failure: LastFailure | None = None
    """Why the last attempt ended, while it is relevant."""
