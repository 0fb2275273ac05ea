"""Overlap, offload, weight sync, checkpoints, failures, reports: how the job runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from rljob_api.v1alpha1.base import PROJECT_PATTERN, Label, NonNegative, PathText, Positive, Seconds, ShortText, SpecModel


class UpdateMode(StrEnum):
    """What happens to running responses when new weights arrive, or when their engine is paused for the trainer."""

    DRAIN = "Drain"
    """They end first."""
    INTERRUPT = "Interrupt"
    """They go on under the new weights with the tokens they have, whose KV cache is computed again."""
    IN_FLIGHT = "InFlight"
    """They go on under the new weights with the KV cache they have; where their engine steps aside, as with Interrupt."""


class Overlap(SpecModel):
    """How far generation may run ahead of training."""

    async_generation_ratio: Annotated[float, Field(ge=0.0, le=64.0)] = 0.0
    """Batches generated ahead; 0 trains synchronously: no trained token is older than the current weights. With more, none is older
    than maxStaleness versions."""
    max_staleness: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Versions by which the oldest trained token may be behind; older groups are dropped and replaced. When not set
    asyncGenerationRatio, rounded up."""
    update_mode: UpdateMode | None = None
    """What happens to running responses when new weights arrive, or when their engine is paused for the trainer. When not set Drain with
    asyncGenerationRatio 0, Interrupt with more."""

    @model_validator(mode="after")
    def _mode_by_ratio(self) -> Overlap:
        if self.update_mode is None:
            mode = UpdateMode.INTERRUPT if self.async_generation_ratio > 0 else UpdateMode.DRAIN
            self.__dict__["update_mode"] = mode  # frozen; model_fields_set stays what the user set
        return self


class Residency(StrEnum):
    """Whether components that share devices stay in device memory. They compute one after the other either way."""

    RESIDENT = "Resident"
    """All stay; their sum must fit."""
    SWITCHING = "Switching"
    """Who is idle leaves the device."""


class Offload(SpecModel):
    """Time-division of shared devices."""

    residency: Residency = Residency.RESIDENT
    """Stay or switch."""
    host_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Budget of pinned host memory per node."""


class SyncBackend(StrEnum):
    """How weights travel from trainer to engines."""

    AUTO = "Auto"
    """IPC where a trainer rank is on every accelerator of the engines, SharedMemory where the trainer's rank 0 and all engines are on one
    node, else ObjectStore."""
    SHARED_MEMORY = "SharedMemory"
    """Packed buckets in shared memory of one node, read in place; needs the trainer's rank 0 and all engines on one node."""
    OBJECT_STORE = "ObjectStore"
    """Packed buckets through Ray's object store: shared memory on one host, the network between hosts."""
    TCP = "TCP"
    """Packed buckets broadcast from the hosts of the sending ranks to those of the engines, by gloo."""
    NCCL = "NCCL"
    """Packed buckets broadcast from the devices of the sending ranks to those of the engines. Not run between GPUs yet: Auto does not
    take it."""
    IPC = "IPC"
    """Packed buckets that engines read in the memory of their own devices, where a trainer rank is on each of them."""


class Senders(StrEnum):
    """Which trainer ranks pack and send."""

    FIRST = "First"
    """Rank 0."""
    PER_NODE = "PerNode"
    """The first rank of each of the trainer's nodes, each its part; with SharedMemory rank 0."""
    EVERY = "Every"
    """All, each its part; with SharedMemory those on the node of rank 0."""


THROUGH_HOST_MEMORY = frozenset({SyncBackend.AUTO, SyncBackend.SHARED_MEMORY, SyncBackend.OBJECT_STORE, SyncBackend.TCP})
"""Backends by which senders pack whole tensors into buckets of their hosts."""


class AdapterSync(StrEnum):
    """What engines get of adapters."""

    MERGED = "Merged"
    """Whole weights with the adapters added: what the trainer computes with, to the bit, at the engine's full speed."""
    SERVED = "Served"
    """Only the adapters, which the engine computes beside the weights of the model's folder."""


class Probe(SpecModel):
    """The check that trainer and engines compute the same log-probs after a sync."""

    every_syncs: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Check every n-th sync; 0 switches it off."""
    sequences: Annotated[int, Field(ge=1, le=1024)] = 4
    """Sequences compared."""
    mean_difference: Positive | None = None
    """Mean absolute difference of a token's log-prob from which on a check is suspect; when not set 2e-5 for float32 and 0.08 for 16-bit
    types, where healthy pairs differ by an RMS of 0.03 to 0.04 nats."""
    tail_difference: Positive | None = None
    """The same of the 95th percentile; when not set 5e-5 for float32 and 0.25 for 16-bit types."""
    fail_factor: Annotated[float, Field(ge=1.0, le=1000.0)] = 2.0
    """A difference of this many times its limit fails the run at once; a suspect check only warns."""
    fail_after: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Suspect checks of one engine in a row that fail the run."""


class Delta(SpecModel):
    """Syncs that bring only the numbers that changed, bit by bit, since the one before, in the engine's dtype.

    Every sender keeps a copy of its part of the weights in host memory for it, every engine one of all. An engine that is new gets all of
    them.
    """

    dense_above: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2
    """Part of a bucket's numbers that changed from which on the bucket travels whole; it also does where that is smaller."""


class WeightSync(SpecModel):
    """How engines get new weights."""

    backend: SyncBackend = SyncBackend.AUTO
    """Which transport. All but ObjectStore are tested when the run starts; where one fails, ObjectStore takes its place, with a warning."""
    senders: Senders = Senders.FIRST
    """Trainer ranks that share the buckets out among them. More of them spread the load of the network over nodes; measured between two
    nodes that have a trainer rank and an engine each, they were slower than one."""
    delta: Delta | None = None
    """Send only what changed; when not set all weights travel. Worth it where a network lies between, not within a node."""
    adapters: AdapterSync = AdapterSync.MERGED
    """What engines get where model.lora is set. Served sends some percent of the bytes and costs generation speed, on CPU devices most of
    it; needs vLLM, and a rank of at most 512."""
    bucket_bytes: Annotated[int, Field(ge=1024, le=17_179_869_184)] = 268_435_456
    """Size up to which tensors are packed together."""
    timeout_seconds: Seconds = 300
    """Deadline of one sync; a sync that misses it fails the run, it never hangs."""
    probe: Probe = Probe()
    """The check after a sync."""


class Checkpoint(SpecModel):
    """What is kept to go on after an interruption."""

    path: PathText | None = None
    """Folder for checkpoints; the run folder's checkpoints/ when not set."""
    every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Save every n steps; 0 saves only at the end and on an interruption."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Complete checkpoints to keep; older ones are removed."""
    asynchronous: bool = True
    """Steps wait only until their state is copied to host memory (12 bytes a parameter, over all ranks; 8 with
    training.optimizerStateDtype bfloat16), and files are written beside the next ones. Switched off they are written from the devices while
    training waits."""
    journal: bool = True
    """Keep finished groups between checkpoints in the run folder, so that a restart does not generate them again; about 9 bytes a token."""


class FailureAction(StrEnum):
    """What a failure rule does."""

    RESTART = "Restart"
    """Start another attempt while some are left."""
    FAIL = "Fail"
    """End the job."""


class FailureRule(SpecModel):
    """A reason and what to do about it."""

    reason: ShortText
    """Failure reason as shown in conditions."""
    action: FailureAction
    """What to do."""


class FailurePolicy(SpecModel):
    """When a failed attempt is followed by another."""

    max_restarts: Annotated[int, Field(ge=0, le=98)] = 0
    """Further attempts after the first; attempt numbers have at most two digits because they end derived names."""
    max_disruptions: Annotated[int, Field(ge=0, le=98)] = 98
    """Further attempts after those that ended as Evicted: drains, preemptions, lost nodes. They do not count as restarts."""
    max_worker_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often lost processes of trainer, critic, reference, teacher, judges and rewards start again within an attempt: on their nodes,
    from the newest checkpoint, while engines stay up. A lost node ends the attempt. For engines see rollout.maxEngineRestarts."""
    restart_backoff_seconds: Seconds = 10
    """Wait before the first restart; doubles with each further one, up to ten minutes. After a disruption it does not double."""
    rules: tuple[FailureRule, ...] = Field(default=(), max_length=32)
    """First match wins; without one, failures of the machine restart and failures of the spec do not."""


class Queue(SpecModel):
    """Kueue queue of the job."""

    name: Label
    """LocalQueue to wait in."""
    priority_class: Label | None = None
    """WorkloadPriorityClass."""
    multi_kueue: bool = False
    """Let MultiKueue run the job on another cluster: the RayJob gets managedBy kueue.x-k8s.io/multikueue, and KubeRay leaves it alone
    here. Needs serviceAccount.name, an account that exists there."""


class TrackerType(StrEnum):
    """An experiment tracker."""

    WANDB = "WandB"
    """Weights & Biases: online where WANDB_API_KEY or WANDB_MODE says so, else offline for `wandb sync`."""
    MLFLOW = "MLflow"
    """MLflow: the server of MLFLOW_TRACKING_URI, else files."""
    TRACKIO = "Trackio"
    """Trackio: the Space of TRACKIO_SPACE_ID or the server of TRACKIO_SERVER_URL, else a database on disk."""
    SWANLAB = "SwanLab"
    """SwanLab: online where SWANLAB_API_KEY or SWANLAB_MODE says so, else offline for `swanlab sync`."""


class Tracker(SpecModel):
    """An experiment tracker that gets every step's metrics and the spec. Its variables are those of the driver, on Kubernetes head.env."""

    type: TrackerType
    """Which one. Its package has to be installed where the driver runs: pip install 'rljob-runtime[wandb]', mlflow, trackio or swanlab."""
    project: Annotated[str, Field(min_length=1, max_length=128, pattern=PROJECT_PATTERN)] | None = None
    """Project, or experiment, in which the run appears; when not set the job's name."""


class Report(SpecModel):
    """What the run writes down for people."""

    trajectories_every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Write sampled responses every n steps; 0 switches it off."""
    trajectories_per_step: Annotated[int, Field(ge=1, le=1024)] = 4
    """How many, besides the first four that failed since the step before."""
    metrics_endpoint: bool = True
    """Serve the newest metrics to Prometheus at port 9464 of the head, named rljob-metrics; rljob run has --metrics-port instead."""
    trackers: tuple[Tracker, ...] = Field(default=(), max_length=4)
    """Experiment trackers that get the metrics, each at most once. The run goes on, with a warning, without one that fails."""


class Validation(SpecModel):
    """When validation prompts are answered."""

    every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Validate every n steps; 0 switches it off."""
    at_start: bool = True
    """Also validate the weights that the run starts with."""
    pause_generation: bool = False
    """Stop training rollouts meanwhile; else they go on."""
    max_prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Prompts of one validation, the first of data.validation, the same every time."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 1
    """Responses per prompt."""
    max_response_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Responses are cut here; when not set at rollout.maxResponseTokens."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 switches it off."""


class Measured(SpecModel):
    """Seconds of one step's phases in an earlier run of this job; `rljob plan --measured` reads them from its summary.json.

    Placements with mode Auto are chosen by them. What is not given is estimated.
    """

    rollout_devices: Annotated[int, Field(ge=1, le=131072)]
    """Devices that generated."""
    trainer_devices: Annotated[int, Field(ge=1, le=131072)]
    """Devices that trained."""
    generate_seconds: Positive
    """Generation of one step's batch on those devices."""
    train_seconds: Positive
    """Training on it."""
    sync_seconds: NonNegative = 0.0
    """Weight sync to all engines."""
