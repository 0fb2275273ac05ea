"""The resource itself: metadata, spec, status."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from rljob_api.v1alpha1.algorithm import Algorithm
from rljob_api.v1alpha1.base import JOB_NAME_PATTERN, FreeForm, PathText, Seconds, ShortText, SpecModel
from rljob_api.v1alpha1.components import Component, Role
from rljob_api.v1alpha1.data import Data, Model, Reward
from rljob_api.v1alpha1.environments import Environment
from rljob_api.v1alpha1.learning import Rollout, Training
from rljob_api.v1alpha1.nodes import Head, NodeGroup, Storage
from rljob_api.v1alpha1.operations import (
    Checkpoint,
    FailurePolicy,
    Measured,
    Offload,
    Overlap,
    Queue,
    Report,
    Validation,
    WeightSync,
)
from rljob_api.v1alpha1.pods import ChildMetadata, ModelCache, ObjectName, PullSecret, ServiceAccount

API_VERSION = "rljob.dev/v1alpha1"
KIND = "RLJob"


class Pipeline(StrEnum):
    """Kind of job."""

    RLVR = "RLVR"
    """One prompt, one response, a verifiable reward."""
    AGENTIC = "Agentic"
    """Several turns with an environment."""


class ObjectMeta(SpecModel):
    """The part of Kubernetes' metadata that RLJob reads; the rest is Kubernetes' own and passes untouched."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=43, pattern=JOB_NAME_PATTERN)]
    """Name of the job. At most 43 characters: children are called <name>-a<attempt>, and KubeRay allows 47."""
    namespace: ShortText | None = None
    """Namespace of the job."""


class RLJobSpec(SpecModel):
    """What to train, on what, how."""

    suspend: bool = False
    """Stop the job and release its devices; false starts or resumes it."""
    managed_by: ShortText | None = None
    """Controller that handles this job; by default RLJob's own."""
    queue: Queue | None = None
    """Kueue queue."""
    image: PathText | None = None
    """Container image of head and workers; by default the operator's."""
    ray_version: ShortText | None = None
    """Ray version in the image; by default that of the operator's default image. A run compares it with the installed version."""
    image_pull_secrets: tuple[PullSecret, ...] = Field(default=(), max_length=16)
    """Secrets for pulling the images; by default those that the operator is configured with."""
    service_account: ServiceAccount | None = None
    """Account of all pods; by default RLJob creates one for the head, and nodes have the namespace's default account without a token."""
    metadata: ChildMetadata = ChildMetadata()
    """Labels and annotations of the RayJob, its RayCluster and all pods."""
    priority_class_name: ObjectName | None = None
    """Kubernetes PriorityClass of all pods; that of a Kueue queue is in queue."""
    scheduler_name: ObjectName | None = None
    """Kubernetes scheduler of all pods; the default one when not set."""
    do_not_disrupt: bool = False
    """Ask node autoscalers (Karpenter, the cluster autoscaler) not to evict the pods to save machines. This does not prevent drains,
    preemptions, and lost machines."""
    refuse_evictions: bool = False
    """Create a PodDisruptionBudget, so that the API server refuses evictions of the job's pods and kubectl drain waits for the end of the
    job. This does not prevent preemptions, deletions, and lost machines. By default a drained job writes a checkpoint and continues
    elsewhere."""
    head: Head = Head()
    """Pod of the Ray head and the driver."""
    storage: Storage | None = None
    """Volume for logs, checkpoints and the model; without one they are lost with the pods, and a restart begins at step 0."""
    model_cache: ModelCache | None = None
    """Volume for models and data sets from a Hub; by default they are in the pod's home folder, and lost with the pod."""
    pod_template: FreeForm | None = None
    """Partial pod template merged over every generated pod, before the head's and the groups' own."""
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1, max_length=16)
    """Machines, in rank order."""
    components: tuple[Component, ...] = Field(min_length=1, max_length=64)
    """What runs where."""
    measured: Measured | None = None
    """Phase times of an earlier run, for placements with mode Auto."""
    pipeline: Pipeline = Pipeline.RLVR
    """Kind of job."""
    model: Model
    """The policy to train."""
    data: Data = Data()
    """Prompts of an RLVR job."""
    rewards: tuple[Reward, ...] = Field(default=(), max_length=32)
    """How responses are scored; the first one decides whether a response passes."""
    environments: tuple[Environment, ...] = Field(default=(), max_length=32)
    """Environments of an agentic job, which provide prompts and rewards."""
    algorithm: Algorithm = Algorithm()
    """The learning rule."""
    rollout: Rollout = Rollout()
    """How responses are generated."""
    training: Training = Training()
    """How the policy is updated."""
    validation: Validation = Validation()
    """When and how the policy is validated."""
    overlap: Overlap = Overlap()
    """How far generation may run ahead of training."""
    offload: Offload = Offload()
    """Time-division of shared devices."""
    weight_sync: WeightSync = WeightSync()
    """How engines get new weights."""
    checkpoint: Checkpoint = Checkpoint()
    """What is saved to continue after an interruption."""
    failure_policy: FailurePolicy = FailurePolicy()
    """When a failed attempt is followed by another."""
    report: Report = Report()
    """Reports that the run writes for users."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 0
    """Seed of data order, sampling and initial states."""
    startup_deadline_seconds: Seconds = 1800
    """Time limit from the start until all workers are ready. Time in which a pod cannot be scheduled does not count."""
    scheduling_deadline_seconds: Seconds | None = None
    """Time limit for pods that cannot be scheduled; by default the job waits without a limit."""
    active_deadline_seconds: Seconds | None = None
    """Time limit of the whole run, over all attempts; of a job in a queue since it was last admitted."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Delete the job this long after its end; by default it is kept."""

    @property
    def validates_only(self) -> bool:
        """Whether nothing is trained: the model is validated once as it is."""
        return self.training.steps == 0

    def with_role(self, role: Role) -> list[tuple[int, Component]]:
        """Components of one role with their index."""
        return [(index, component) for index, component in enumerate(self.components) if component.role is role]

    def tensor_parallel_size(self, component: Component) -> int:
        """Processes of a component that share each layer; an engine's devices are within one process."""
        return self._sizes(component).tensor_parallel_size or 1

    def token_parts(self, component: Component) -> int:
        """Processes of a component that share each layer and divide its tokens between attention and MLP."""
        return self.training.tensor_parallel_size if component.role is Role.TRAINER and self.training.sequence_parallel else 1

    def context_parallel_size(self, component: Component) -> int:
        """Tensor-parallel groups of a component that share each sequence."""
        return self._sizes(component).context_parallel_size or 1

    def expert_parallel_size(self, component: Component) -> int:
        """Processes of a component that have a part each of a layer's experts."""
        return self._sizes(component).expert_parallel_size or 1

    def processes_per_share(self, component: Component) -> int:
        """Processes of a component that compute one data-parallel share together."""
        return self.context_parallel_size(component) * self.tensor_parallel_size(component)

    def device_unit(self, component: Component) -> int:
        """Processes of which a component has a multiple: those of a share, and of a group that divides experts."""
        return math.lcm(self.processes_per_share(component), self.expert_parallel_size(component))

    def _sizes(self, component: Component) -> Training | Component:
        """What has the parallel sizes of a component."""
        return self.training if component.role is Role.TRAINER else component


class RLJob(SpecModel):
    """Reinforcement-learning post-training of a language model, as one resource."""

    api_version: Literal["rljob.dev/v1alpha1"]
    """Always rljob.dev/v1alpha1."""
    kind: Literal["RLJob"]
    """Always RLJob."""
    metadata: ObjectMeta
    """Name and namespace."""
    spec: RLJobSpec
    """What to train, on what, how."""
    status: dict[str, Any] | None = None
    """Written by the operator; accepted here so that `kubectl get -o yaml` output can be read back."""
