"""Overlap, offload, weight sync, checkpoints, failures, reports: how the job runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from rljob_api.v1alpha1.base import PROJECT_PATTERN, Label, NonNegative, PathText, Positive, Seconds, ShortText, SpecModel


class UpdateMode(StrEnum):
    """What happens to running responses when new weights arrive, or when their engine is paused for the trainer."""

    DRAIN = "Drain"
    """They finish first."""
    INTERRUPT = "Interrupt"
    """They continue under the new weights with the tokens they have, whose KV cache is recomputed."""
    IN_FLIGHT = "InFlight"
    """They continue under the new weights with the KV cache they have; if their engine is paused for the trainer, as with Interrupt."""


class Overlap(SpecModel):
    """How far generation may run ahead of training."""

    async_generation_ratio: Annotated[float, Field(ge=0.0, le=64.0)] = 0.0
    """Batches generated ahead; fractions are allowed. 0 is synchronous: no trained token is older than the current weights. Above 0, none
    is older than maxStaleness versions."""
    max_staleness: Annotated[int, Field(ge=0, le=1024)] | None = None
    """Versions that a trained token may be behind; older groups are dropped and replaced. By default asyncGenerationRatio, rounded up."""
    update_mode: UpdateMode | None = None
    """What happens to running responses when new weights arrive, or when their engine is paused for the trainer. By default Drain with
    asyncGenerationRatio 0, otherwise Interrupt."""

    @model_validator(mode="after")
    def _mode_by_ratio(self) -> Overlap:
        if self.update_mode is None:
            mode = UpdateMode.INTERRUPT if self.async_generation_ratio > 0 else UpdateMode.DRAIN
            self.__dict__["update_mode"] = mode  # frozen; model_fields_set stays what the user set
        return self


class Residency(StrEnum):
    """Whether components that share devices stay in device memory. Either way, they compute one after the other."""

    RESIDENT = "Resident"
    """All stay; together they must fit."""
    SWITCHING = "Switching"
    """Idle components are offloaded."""


class Offload(SpecModel):
    """Time-division of shared devices."""

    residency: Residency = Residency.RESIDENT
    """Whether components that share devices stay in device memory or switch."""
    host_memory_bytes: Annotated[int, Field(ge=1)] | None = None
    """Limit of the host memory for offloaded state, per node."""


class SyncBackend(StrEnum):
    """How weights are sent from the trainer to the engines."""

    AUTO = "Auto"
    """IPC if a trainer rank is on every accelerator of the engines, SharedMemory if the trainer's rank 0 and all engines are on one node,
    TCP if engines are on two or more other nodes, otherwise ObjectStore; with SGLang engines TCP or ObjectStore."""
    SHARED_MEMORY = "SharedMemory"
    """Packed buckets in shared memory of one node, read in place; needs the trainer's rank 0 and all engines on one node."""
    OBJECT_STORE = "ObjectStore"
    """Packed buckets through Ray's object store: shared memory on one host, the network between hosts."""
    TCP = "TCP"
    """Packed buckets between the hosts' memories, over sockets in a chain: from the host of the sending rank to an engine, which forwards
    them to an engine of the next node while it receives. Other engines of a node read its copy in shared memory."""
    NCCL = "NCCL"
    """Packed buckets broadcast from the devices of the sending ranks to those of the engines. Not run between GPUs yet, so Auto does not
    select it."""
    IPC = "IPC"
    """Packed buckets that engines read from the memory of their own devices; needs a trainer rank on each of them."""


class Senders(StrEnum):
    """Which trainer ranks pack and send."""

    FIRST = "First"
    """Rank 0."""
    PER_NODE = "PerNode"
    """The first rank on each of the trainer's nodes sends a part; with SharedMemory, rank 0."""
    EVERY = "Every"
    """Every rank sends a part; with SharedMemory, those on the node of rank 0."""


THROUGH_HOST_MEMORY = frozenset(
    {
        SyncBackend.AUTO,
        SyncBackend.SHARED_MEMORY,
        SyncBackend.OBJECT_STORE,
        SyncBackend.TCP,
    }
)
"""Backends by which senders pack whole tensors into buckets of their hosts."""


class AdapterSync(StrEnum):
    """How engines get adapters."""

    MERGED = "Merged"
    """Whole weights with the adapters added: bit for bit what the trainer computes with, at the engine's full speed."""
    SERVED = "Served"
    """Only the adapters, which the engine applies on top of the weights of the model's folder."""


class Probe(SpecModel):
    """The check that trainer and engines compute the same log-probs after a sync."""

    every_syncs: Annotated[int, Field(ge=0, le=1_000_000)] = 1
    """Check every n-th sync; 0 disables the check."""
    sequences: Annotated[int, Field(ge=1, le=1024)] = 4
    """Sequences compared."""
    mean_difference: Positive | None = None
    """Limit of the mean absolute difference of a token's log-prob, above which a check is suspect; by default 2e-5 for float32 and 0.08 for
    16-bit types, in which healthy pairs differ by an RMS of 0.03 to 0.04 nats."""
    tail_difference: Positive | None = None
    """The same for the 95th percentile; by default 5e-5 for float32 and 0.25 for 16-bit types."""
    fail_factor: Annotated[float, Field(ge=1.0, le=1000.0)] = 2.0
    """A difference of this many times its limit fails the run at once; a suspect check only warns."""
    fail_after: Annotated[int, Field(ge=1, le=1_000_000)] = 3
    """Number of consecutive suspect checks of one engine that fails the run."""


class Delta(SpecModel):
    """Syncs that send only the values that differ bitwise from the previous sync, in the engine's dtype.

    For this, every sender keeps a copy of its part of the weights: in host memory, and with NCCL and IPC on its device (with IPC every rank
    keeps all weights). Engines keep copies in host memory of what they cannot write into their parameters. A new engine gets all weights.
    """

    dense_above: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """A bucket is sent whole if more than this fraction of its values changed, or if that takes fewer bytes."""


class WeightSync(SpecModel):
    """How engines get new weights."""

    backend: SyncBackend = SyncBackend.AUTO
    """Transport. All but ObjectStore are tested when the run starts; if the test fails, ObjectStore is used, with a warning."""
    senders: Senders = Senders.FIRST
    """Trainer ranks that the buckets are divided among. More senders spread the network load over nodes; between two nodes with a trainer
    rank and an engine each, they were slower than one (measured)."""
    delta: Delta | None = None
    """Send only what changed; by default all weights are sent. Useful between nodes, not within a node through host memory. With Auto, IPC
    is not selected; request it by name."""
    adapters: AdapterSync = AdapterSync.MERGED
    """What engines get if model.lora is set. Served sends a few percent of the bytes but slows generation down, on CPU devices by a large
    factor; needs vLLM without pipeline stages and a rank of at most 512."""
    bucket_bytes: Annotated[int, Field(ge=1024, le=17_179_869_184)] = 268_435_456
    """Size of the buckets that tensors are packed into."""
    timeout_seconds: Seconds = 300
    """Deadline of one sync; a sync that misses it fails the run."""
    probe: Probe = Probe()
    """The check after a sync."""


class Checkpoint(SpecModel):
    """What is saved to continue after an interruption."""

    path: PathText | None = None
    """Folder for checkpoints, in which each job has one of its own: its name, on a cluster below its namespace; the run folder's
    checkpoints/ when not set."""
    every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Save every n steps; 0 saves only at the end and when interrupted."""
    keep: Annotated[int, Field(ge=1, le=1000)] = 2
    """Complete checkpoints to keep; older ones are removed."""
    asynchronous: bool = True
    """Steps wait only until their state is copied to host memory (12 bytes per parameter over all ranks; 8 with
    training.optimizerStateDtype bfloat16); files are written during the next steps. If false, they are written from the devices while
    training waits."""
    journal: bool = True
    """Keep finished groups between checkpoints in the run folder, so that a restart need not generate them again; 9 bytes per token."""


class FailureAction(StrEnum):
    """What a failure rule does."""

    RESTART = "Restart"
    """Start another attempt, if any are left."""
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
    """Number of restarts after the first attempt; attempt numbers have at most two digits because derived names end with them."""
    max_disruptions: Annotated[int, Field(ge=0, le=98)] = 98
    """Number of attempts that may follow one that ended as Evicted (drain, preemption, lost node). These do not count as restarts."""
    max_worker_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often lost trainer, critic, reference, teacher, judge, and reward processes are restarted within an attempt, on their nodes and
    from the newest checkpoint, while engines stay up. A lost node ends the attempt. For engines see rollout.maxEngineRestarts."""
    restart_backoff_seconds: Seconds = 10
    """Wait before the first restart; doubles with each further one, up to ten minutes. After a disruption it does not double."""
    rules: tuple[FailureRule, ...] = Field(default=(), max_length=32)
    """The first match wins; without a match, machine failures are retried, and failures of the spec, the data, or user code are not."""


class Queue(SpecModel):
    """Kueue queue of the job."""

    name: Label
    """LocalQueue to wait in."""
    priority_class: Label | None = None
    """WorkloadPriorityClass."""
    multi_kueue: bool = False
    """Let MultiKueue run the job on another cluster: the RayJob gets managedBy kueue.x-k8s.io/multikueue, and KubeRay ignores it on
    this cluster. Needs serviceAccount.name, an account that exists there."""


class TrackerType(StrEnum):
    """An experiment tracker."""

    WANDB = "WandB"
    """Weights & Biases: online if WANDB_API_KEY is set or WANDB_MODE is online, otherwise offline, for `wandb sync`."""
    MLFLOW = "MLflow"
    """MLflow: the server of MLFLOW_TRACKING_URI, otherwise files."""
    TRACKIO = "Trackio"
    """Trackio: the Space of TRACKIO_SPACE_ID or the server of TRACKIO_SERVER_URL, otherwise a database on disk."""
    SWANLAB = "SwanLab"
    """SwanLab: online if SWANLAB_API_KEY is set or SWANLAB_MODE is online, otherwise offline, for `swanlab sync`."""


class Tracker(SpecModel):
    """An experiment tracker that gets every step's metrics and the spec. It reads the driver's variables; on Kubernetes, head.env."""

    type: TrackerType
    """Its type. Its package must be installed where the driver runs: pip install 'rljob-runtime[wandb]', mlflow, trackio, or swanlab."""
    project: Annotated[str, Field(min_length=1, max_length=128, pattern=PROJECT_PATTERN)] | None = None
    """Project, or experiment, in which the run appears; by default the job's name."""


class Report(SpecModel):
    """Reports that the run writes for users."""

    trajectories_every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Save sampled responses every n steps; 0 disables it."""
    trajectories_per_step: Annotated[int, Field(ge=1, le=1024)] = 4
    """How many, in addition to the first four that failed since then."""
    metrics_endpoint: bool = True
    """Serve the latest metrics to Prometheus on port 9464 of the head, named rljob-metrics; `rljob run` has --metrics-port instead."""
    trackers: tuple[Tracker, ...] = Field(default=(), max_length=4)
    """Experiment trackers that get the metrics, each at most once. If one fails, the run continues without it, with a warning."""


class Validation(SpecModel):
    """When and how the policy is validated."""

    every_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Validate every n steps; 0 disables it."""
    at_start: bool = True
    """Also validate the weights that the run starts with."""
    pause_generation: bool = False
    """Pause generation for training during a validation; otherwise it continues."""
    max_prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 256
    """Prompts per validation: the first ones of data.validation, the same every time."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 1
    """Responses per prompt."""
    max_response_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Maximum length of a response; rollout.maxResponseTokens by default."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0
    """Sampling temperature of validation; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 disables it."""
    top_k: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Sample from the k most likely tokens; 0 disables it."""


class Measured(SpecModel):
    """Seconds of one step's phases in an earlier run of this job; `rljob plan --measured` reads them from its summary.json.

    Placements with mode Auto are based on them. What is not given is estimated.
    """

    rollout_devices: Annotated[int, Field(ge=1, le=131072)]
    """Devices that generated."""
    trainer_devices: Annotated[int, Field(ge=1, le=131072)]
    """Devices that trained."""
    generate_seconds: Positive
    """Generation of one step's batch on those devices."""
    train_seconds: Positive
    """Training on that batch."""
    sync_seconds: NonNegative = 0.0
    """Weight sync to all engines."""
