"""What the runtime knows of each role: how its workers start, what state they hold, how they lease devices, what the loop does with them.

The other half, what the planner and validation know, is :mod:`rljob_api`'s table of roles. Launch, device sharing and the loop read this
table and name no role themselves, so that a new role is a row here and one there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.rules.algorithm import base_is_reference
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.vocabulary import GradientReduction
from rljob_runtime.engine.registry import engine_worker, judge_worker
from rljob_runtime.engine.residence import ENGINE_KINDS
from rljob_runtime.environments.config import WorkerConfig
from rljob_runtime.job import learning_settings, worker_settings
from rljob_runtime.job.judge_settings import JUDGED_CALLS, share_of
from rljob_runtime.loop.checkpointing import CRITIC_FOLDER, POLICY_FOLDER
from rljob_runtime.loop.workers import Scoring
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.offload.states import StateKind

ENVIRONMENT_CALLS = 4
"""Answered at the same time by an environment worker: a submission beside a collection that waits, metrics, the end."""
FROZEN_KINDS = frozenset({StateKind.PARAMS, StateKind.OTHER})
TRAINED_KINDS = FROZEN_KINDS | {StateKind.GRADS, StateKind.OPTIMIZER}


class LeaseUnit(StrEnum):
    """What leases shared devices as a whole."""

    COMPONENT = "component"
    """All workers together: they compute in collectives."""
    PROCESS = "process"
    """Each worker on its own, so that those with devices of their own never wait."""
    NONE = "none"
    """Its workers use no device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How a process uses shared devices; from :mod:`.device_sharing`."""

    releases: bool = False
    """Whether it leaves its devices for others."""
    releases_kinds: tuple[StateKind, ...] = ()
    """Kinds that a policy's process gives up there."""
    host_bytes: int | None = None
    """Host memory for what it offloads; None: no limit."""
    optimizer_around_step: bool = False
    """Whether optimizer state is on the device only while it updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """One planned process, and all that its worker's settings may depend on."""

    spec: RLJobSpec
    plan: Plan
    component: PlannedComponent
    process: PlannedProcess
    on_cpu: bool
    """Whether its devices are CPU devices."""
    num_threads: int
    devices: DeviceUse
    job_folder: Path | None
    """Searched first for the user's functions."""
    log_dir: Path
    gradient_reduction: GradientReduction = GradientReduction.LAST_MICRO_BATCH
    """Never Auto."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How to construct a worker inside its process."""

    factory: str
    """``module:Class``."""
    kwargs: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set beneath the user's variables."""
    concurrency: int = 1
    """Calls that it answers at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDescription:
    """All that the job knows of a role."""

    settings: Callable[[WorkerContext], WorkerSettings]
    state_kinds: frozenset[StateKind] = frozenset()
    """State that its workers hold on devices."""
    rederived_kinds: frozenset[StateKind] = frozenset()
    """Those of them that need no copy when they leave: a weight sync writes them again."""
    lease: LeaseUnit = LeaseUnit.NONE
    start_stage: int = 1
    """Where components switch, stage 0 starts first and releases its devices before stage 1 measures what is free there."""
    process_group: bool = False
    """Whether its workers form a process group and load the model together (``setup``)."""
    phase: str = ""
    """What a lease of its devices is for, with ``{step}``."""
    checkpoint_folder: str | None = None
    """Its folder in a checkpoint."""
    scorings: Mapping[Scoring, Callable[[RLJobSpec], bool]] = field(default_factory=dict)
    """Forward passes that it can make over a step's samples, and whether a job asks for them."""
    reads_model: bool = False
    """Whether its workers read files of the model's folder though they hold no state of it, such as the tokenizer."""
    replaceable: bool = False
    """Whether another process can take the place of a lost worker while the others go on: what it holds is elsewhere, or can begin again.
    Where nothing replaces it, other workers of the role take over."""
    stays: bool = False
    """Whether its workers go on where others that were lost start again: what they hold is sent again, or never changes."""
    forgets: str | None = None
    """Method, given seconds, that ends what such a worker does for the loop that broke off."""
    serves: bool = False
    """Whether its workers serve HTTP (``serve``) to others of the job, with a key of their component. They bring their model themselves."""
    closes: bool = False
    """Whether its workers end processes of their own, and are asked to (``close``) before they are ended."""
    says: str | None = None
    """Method of a worker that returns a line about what it found on its node, for the run's events; asked of the first one."""

    @property
    def trains(self) -> bool:
        """Whether its workers update weights."""
        return StateKind.OPTIMIZER in self.state_kinds

    def scorings_in(self, spec: RLJobSpec) -> tuple[Scoring, ...]:
        """Forward passes that it makes in a job."""
        return tuple(scoring for scoring, is_asked in self.scorings.items() if is_asked(spec))


def _needs_proximal(spec: RLJobSpec) -> bool:
    """Whether the loss compares with the trainer's own log-probs at the beginning of the step."""
    return learning_settings.loss_config(spec).needs_proximal


def _policy_settings(context: WorkerContext) -> WorkerSettings:
    """A rank of the trainer, or of a reference, which trains nothing."""
    config = worker_settings.policy_config(context.spec, role=context.component.role, **_policy_arguments(context))
    return _rank("rljob_runtime.training.worker:PolicyWorker", config, context)


def _teacher_settings(context: WorkerContext) -> WorkerSettings:
    """A rank of a teacher: a frozen policy of another folder, without the loss that nobody computes there."""
    model = worker_settings.component_spec(context.spec, context.component.name).model
    if model is None:
        raise ValueError(f"{context.component.name} is a Teacher without a model; validation lets none through")
    policy = worker_settings.policy_config(context.spec, role=Role.TEACHER, **_policy_arguments(context))
    config = replace(policy, model_path=model.path, trust_remote_code=model.trust_remote_code, loss=LossConfig())
    return _rank("rljob_runtime.training.worker:PolicyWorker", config, context)


def _critic_settings(context: WorkerContext) -> WorkerSettings:
    policy = worker_settings.policy_config(context.spec, role=Role.CRITIC, **_policy_arguments(context))
    return _rank("rljob_runtime.training.critic:CriticWorker", learning_settings.critic_config(context.spec, policy), context)


def _policy_arguments(context: WorkerContext) -> dict[str, Any]:
    use, component = context.devices, worker_settings.component_spec(context.spec, context.component.name)
    return {
        "num_threads": context.num_threads,
        "tensor_parallel_size": context.spec.tensor_parallel_size(component),
        "context_parallel_size": context.spec.context_parallel_size(component),
        "expert_parallel_size": context.spec.expert_parallel_size(component),
        "offload_host_bytes": use.host_bytes,
        "reserve": use.releases_kinds,
        "optimizer_around_step": use.optimizer_around_step,
        "reduces_each_micro_batch": context.gradient_reduction is GradientReduction.EACH_MICRO_BATCH,
        "job_folder": context.job_folder,
    }


def _rank(factory: str, config: object, context: WorkerContext) -> WorkerSettings:
    kwargs = {"config": config, "rank": context.process.rank, "world_size": context.component.world_size}
    return WorkerSettings(factory=factory, kwargs=kwargs)


def _engine_settings(context: WorkerContext) -> WorkerSettings:
    component = worker_settings.component_spec(context.spec, context.component.name)
    engine = engine_worker(
        context.spec,
        component,
        on_cpu=context.on_cpu,
        num_threads=context.num_threads,
        releases_devices=context.devices.releases,
    )
    return WorkerSettings(factory=engine.factory, kwargs=engine.kwargs, environment=engine.env, concurrency=engine.concurrency)


def _reward_settings(context: WorkerContext) -> WorkerSettings:
    share = share_of(context.plan, context.component.name, context.process.rank)
    kwargs = {
        "configs": [worker_settings.reward_config(reward, share) for reward in context.spec.rewards],
        "folder": context.job_folder,
        "log_file": context.log_dir / f"{context.component.name}-{context.process.rank}.log",
    }
    concurrency = JUDGED_CALLS if any(reward.asked is not None for reward in context.spec.rewards) else 1
    return WorkerSettings(factory="rljob_runtime.rewards.worker:RewardWorker", kwargs=kwargs, concurrency=concurrency)


def _server_settings(context: WorkerContext) -> WorkerSettings:
    component = worker_settings.component_spec(context.spec, context.component.name)
    log_file = context.log_dir / f"{component.name}-{context.process.rank}-server.log"
    server = judge_worker(
        context.spec,
        component,
        on_cpu=context.on_cpu,
        num_threads=context.num_threads,
        log_file=log_file,
        releases_devices=context.devices.releases,
    )
    return WorkerSettings(factory=server.factory, kwargs=server.kwargs, environment=server.env, concurrency=server.concurrency)


def _environment_settings(context: WorkerContext) -> WorkerSettings:
    model = context.spec.model
    config = WorkerConfig(
        environments=tuple(worker_settings.environment_config(context.spec, e, Path.cwd()) for e in context.spec.environments),
        tokenizer_path=model.tokenizer_path or model.path,
        trust_remote_code=model.trust_remote_code,
        job_folder=context.job_folder,
        log_dir=context.log_dir / f"{context.component.name}-{context.process.rank}",
        startup_timeout_s=context.spec.startup_deadline_seconds,
    )
    factory = "rljob_runtime.environments.worker:EnvironmentWorker"
    return WorkerSettings(factory=factory, kwargs={"config": config}, concurrency=ENVIRONMENT_CALLS)


ROLES: Mapping[Role, RoleDescription] = {
    Role.REFERENCE: RoleDescription(
        settings=_policy_settings,
        state_kinds=FROZEN_KINDS,
        lease=LeaseUnit.COMPONENT,
        start_stage=0,
        process_group=True,
        phase="reference log-probs of step {step}",
        stays=True,
        scorings={Scoring(method="compute_logprobs", result="reference_logprobs"): lambda spec: True},
    ),
    Role.TEACHER: RoleDescription(
        settings=_teacher_settings,
        state_kinds=FROZEN_KINDS,
        lease=LeaseUnit.COMPONENT,
        start_stage=0,
        process_group=True,
        phase="teacher's log-probs of step {step}",
        stays=True,
        scorings={Scoring(method="compute_logprobs", result="teacher_logprobs"): lambda spec: True},
    ),
    Role.TRAINER: RoleDescription(
        settings=_policy_settings,
        state_kinds=TRAINED_KINDS,
        lease=LeaseUnit.COMPONENT,
        start_stage=0,
        process_group=True,
        phase="training of step {step}",
        checkpoint_folder=POLICY_FOLDER,
        scorings={
            Scoring(method="compute_base_logprobs", result="reference_logprobs"): base_is_reference,
            Scoring(method="compute_logprobs", result="proximal_logprobs", takes_routes=True): _needs_proximal,
        },
    ),
    Role.CRITIC: RoleDescription(
        settings=_critic_settings,
        state_kinds=TRAINED_KINDS,
        lease=LeaseUnit.COMPONENT,
        start_stage=0,
        process_group=True,
        phase="critic of step {step}",
        checkpoint_folder=CRITIC_FOLDER,
        scorings={Scoring(method="compute_values", result="values", takes_sampling=False): lambda spec: True},
    ),
    Role.ROLLOUT: RoleDescription(
        settings=_engine_settings,
        state_kinds=ENGINE_KINDS,
        rederived_kinds=frozenset({StateKind.PARAMS}),
        lease=LeaseUnit.PROCESS,
        phase="generation for step {step}",
        replaceable=True,
        stays=True,
        forgets="clear",
    ),
    Role.REWARD: RoleDescription(settings=_reward_settings, closes=True, says="describe_sandbox"),
    Role.JUDGE: RoleDescription(
        settings=_server_settings,
        state_kinds=frozenset({StateKind.PARAMS}),
        lease=LeaseUnit.COMPONENT,
        start_stage=0,
        phase="scores of step {step}",
        serves=True,
        stays=True,
        closes=True,
    ),
    Role.ENVIRONMENT: RoleDescription(settings=_environment_settings, closes=True, reads_model=True, replaceable=True),
}
"""Every role that a job may have today; a test compares it with what validation admits."""
