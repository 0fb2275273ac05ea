"""The resource itself: metadata, spec, status."""

from __future__ import annotations

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
    """The shape of the loop."""

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
    """Stop the job and give its devices back; false starts or resumes it."""
    managed_by: ShortText | None = None
    """Controller that handles this job; RLJob's own when not set."""
    queue: Queue | None = None
    """Kueue queue."""
    image: PathText | None = None
    """Container image of head and workers; the operator's default image when not set."""
    ray_version: ShortText | None = None
    """Ray version inside the image; that of the operator's default image when not set. A run checks it against the installed one."""
    image_pull_secrets: tuple[PullSecret, ...] = Field(default=(), max_length=16)
    """Secrets for pulling the images; those that the operator is configured with when not set."""
    service_account: ServiceAccount | None = None
    """Account of all pods; when not set the head has one of its own, and the nodes have the namespace's default one without a token."""
    metadata: ChildMetadata = ChildMetadata()
    """Labels and annotations of the RayJob, its RayCluster and all pods."""
    priority_class_name: ObjectName | None = None
    """Kubernetes PriorityClass of all pods; that of a Kueue queue is in queue."""
    scheduler_name: ObjectName | None = None
    """Kubernetes scheduler of all pods; the default one when not set."""
    do_not_disrupt: bool = False
    """Ask node autoscalers (Karpenter, the cluster autoscaler) not to evict the pods in order to save machines. Drains, preemptions and
    lost machines are not held off."""
    refuse_evictions: bool = False
    """Let the API server refuse evictions of the job's pods, by a PodDisruptionBudget: kubectl drain waits until the job is over.
    Preemptions, deletions and lost machines are not held off. Otherwise a drained job writes a checkpoint and goes on elsewhere."""
    head: Head = Head()
    """Pod of the Ray head and the driver."""
    storage: Storage | None = None
    """Volume for logs, checkpoints and the model; without one they are lost with the pods, and a restart begins at step 0."""
    model_cache: ModelCache | None = None
    """Volume for models and data sets from a Hub; when not set they are in the pod's home folder, and lost with it."""
    pod_template: FreeForm | None = None
    """Partial pod template merged over every generated pod, before the head's and the groups' own."""
    node_groups: tuple[NodeGroup, ...] = Field(min_length=1, max_length=16)
    """Machines, in rank order."""
    components: tuple[Component, ...] = Field(min_length=1, max_length=64)
    """Who runs where."""
    measured: Measured | None = None
    """Phase times of an earlier run, for placements with mode Auto."""
    pipeline: Pipeline = Pipeline.RLVR
    """Shape of the loop."""
    model: Model
    """The policy to train."""
    data: Data = Data()
    """What the policy is asked, in an RLVR job."""
    rewards: tuple[Reward, ...] = Field(default=(), max_length=32)
    """How responses are judged; the first one decides whether a response counts as solved."""
    environments: tuple[Environment, ...] = Field(default=(), max_length=32)
    """Environments of an agentic job, whose prompts and rewards are theirs."""
    algorithm: Algorithm = Algorithm()
    """The learning rule."""
    rollout: Rollout = Rollout()
    """How responses are generated."""
    training: Training = Training()
    """How the policy is updated."""
    validation: Validation = Validation()
    """When validation prompts are answered."""
    overlap: Overlap = Overlap()
    """How far generation may run ahead of training."""
    offload: Offload = Offload()
    """Time-division of shared devices."""
    weight_sync: WeightSync = WeightSync()
    """How engines get new weights."""
    checkpoint: Checkpoint = Checkpoint()
    """What is kept to go on after an interruption."""
    failure_policy: FailurePolicy = FailurePolicy()
    """When a failed attempt is followed by another."""
    report: Report = Report()
    """What the run writes down for people."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 0
    """Seed of data order, sampling and initial states."""
    startup_deadline_seconds: Seconds = 1800
    """Limit from start until all workers are ready. The time in which pods find no machine does not count."""
    scheduling_deadline_seconds: Seconds | None = None
    """Limit of the time in which pods find no machine; when not set the job waits for as long as it takes."""
    active_deadline_seconds: Seconds | None = None
    """Limit of the whole run."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=31_536_000)] | None = None
    """Delete the job this long after its end; not set keeps it."""

    @property
    def validates_only(self) -> bool:
        """Whether nothing is trained: the model is validated once as it is."""
        return self.training.steps == 0

    def with_role(self, role: Role) -> list[tuple[int, Component]]:
        """Components of one role with their index."""
        return [(index, component) for index, component in enumerate(self.components) if component.role is role]

    def tensor_parallel_size(self, component: Component) -> int:
        """Processes of a component that share each layer; an engine's devices are within one process."""
        if component.role is Role.TRAINER:
            return self.training.tensor_parallel_size
        return component.tensor_parallel_size or 1

    def context_parallel_size(self, component: Component) -> int:
        """Tensor-parallel groups of a component that share each sequence."""
        return self.training.context_parallel_size if component.role is Role.TRAINER else 1

    def expert_parallel_size(self, component: Component) -> int:
        """Processes of a component that have a part each of a layer's experts."""
        return self.training.expert_parallel_size if component.role is Role.TRAINER else 1

    def processes_per_share(self, component: Component) -> int:
        """Processes of a component that compute one data-parallel share together."""
        return self.context_parallel_size(component) * self.tensor_parallel_size(component)


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
