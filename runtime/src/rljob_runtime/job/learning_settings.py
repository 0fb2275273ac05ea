"""From the spec to the settings of the learning rule: losses, advantages, batches, critic, validation. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from rljob_api.rules.distillation import distills, distills_in_loss, teacher_weights
from rljob_api.rules.rollout import max_staleness
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Engine
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_api.vocabulary import AdvantageEstimator, KLPlacement, RouterReplay
from rljob_runtime.engine.registry import engine_adapter
from rljob_runtime.losses.config import CorrectionMaskConfig, CorrectionWeightConfig, LossConfig
from rljob_runtime.losses.custom import load_estimator, load_loss
from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.overlap.batching import BatchingConfig
from rljob_runtime.overlap.filters import GroupFilter
from rljob_runtime.overlap.fleet import FleetConfig
from rljob_runtime.overlap.routing import AFFINITY_MARGIN, Capacity
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.overlap.scheduler import RolloutConfig
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.overlap.validation import ValidationConfig
from rljob_runtime.records import Sampling
from rljob_runtime.training.config import LoadBalancingConfig, LoraConfig, PolicyConfig
from rljob_runtime.training.critic_config import CriticConfig

QUEUED_SHARE = 4
MIN_QUEUED = 8
"""An engine is given up to a quarter more requests than it computes, at least 8, so that a finished one is followed at once by the next."""


def loss_config(spec: RLJobSpec, job_folder: Path | None = None) -> LossConfig:
    """What the policy minimizes; modules of a Custom loss are looked for in ``job_folder`` first."""
    loss, off_policy, kl = spec.algorithm.policy_loss, spec.algorithm.off_policy, spec.algorithm.kl
    weight = off_policy.weight
    return LossConfig(
        policy=loss.settings,
        job_folder=_text(job_folder),
        aggregation=loss.aggregation,
        norm_tokens=spec.rollout.max_response_tokens,
        proximal=off_policy.proximal,
        weight=None if weight is None else CorrectionWeightConfig(level=weight.level, low=weight.low, high=weight.high),
        masks=tuple(CorrectionMaskConfig(level=mask.level, low=mask.low, high=mask.high) for mask in off_policy.masks),
        kl_coefficient=kl.coefficient if kl.placement is KLPlacement.LOSS else 0.0,
        kl_estimator=kl.estimator,
        distillation_coefficient=spec.algorithm.distillation.coefficient if distills_in_loss(spec) else 0.0,
        entropy_coefficient=spec.algorithm.entropy_coefficient,
    )


def rule_config(spec: RLJobSpec, job_folder: Path | None = None) -> RuleConfig:
    """From scores to advantages; modules of a Custom estimator are looked for in ``job_folder`` first."""
    advantage, reward, kl, filters = spec.algorithm.advantage, spec.algorithm.reward, spec.algorithm.kl, spec.algorithm.filters
    of_tags, of_others = teacher_weights(spec)
    return RuleConfig(
        estimator=advantage.estimator,
        function=advantage.function,
        parameters=advantage.parameters,
        job_folder=_text(job_folder),
        normalize_std=advantage.normalize_std,
        gamma=advantage.gamma,
        episode_weight=advantage.episode_weight,
        turn_weight=advantage.turn_weight,
        episode_count=advantage.episode_count,
        lambda_=advantage.lambda_,
        whiten=bool(advantage.whiten),
        advantage_clip=advantage.clip,
        reward_center=reward.center,
        reward_scale=reward.scale,
        reward_clip=reward.clip,
        overlong_buffer_tokens=reward.overlong.buffer_tokens if reward.overlong else None,
        overlong_penalty=reward.overlong.penalty if reward.overlong else 1.0,
        max_response_tokens=spec.rollout.max_response_tokens,
        kl_coefficient=kl.coefficient,
        kl_estimator=kl.estimator,
        kl_placement=kl.placement,
        kl_target=kl.target,
        kl_horizon=kl.horizon,
        distillation_coefficient=spec.algorithm.distillation.coefficient if distills(spec) else 0.0,
        distillation_placement=spec.algorithm.distillation.placement,
        teacher_weights=of_tags,
        other_teacher_weight=of_others,
        drop_truncated=filters.truncated,
        min_group_mean=filters.min_group_mean,
        max_group_mean=filters.max_group_mean,
        max_failed_tokens=filters.max_failed_tokens,
        weight_by_difficulty=spec.algorithm.sample_weights.difficulty,
        weight_by_length=spec.algorithm.sample_weights.length,
    )


def check_functions(spec: RLJobSpec, job_folder: Path | None) -> None:
    """Import the user's own loss and advantage estimator, where the spec names them.

    Raises:
        PluginError: one cannot be imported, or not be called with its parameters.
    """
    loss, advantage, folder = spec.algorithm.policy_loss, spec.algorithm.advantage, _text(job_folder)
    if loss.function is not None:
        load_loss(loss.function, loss.parameters, folder)
    if advantage.function is not None:
        load_estimator(advantage.function, advantage.parameters, folder)


def batching_config(spec: RLJobSpec, num_ranks: int) -> BatchingConfig:
    """How samples become batches; ``num_ranks`` is the trainer's data-parallel size."""
    loss = loss_config(spec)
    return BatchingConfig(
        num_ranks=num_ranks,
        mini_batches=spec.training.mini_batches,
        epochs=spec.training.epochs,
        temperature=spec.rollout.temperature,
        include_staleness=loss.needs_staleness,
        include_teacher=loss.needs_teacher,
        include_scores=loss.needs_scores,
    )


def lora_config(spec: RLJobSpec) -> LoraConfig | None:
    """Adapters of the trainer."""
    lora = spec.model.lora
    return None if lora is None else LoraConfig(rank=lora.rank, alpha=lora.alpha, target_modules=lora.target_modules)


def load_balancing_config(spec: RLJobSpec) -> LoadBalancingConfig | None:
    """Of the trainer's routers."""
    balancing = spec.training.load_balancing
    return None if balancing is None else LoadBalancingConfig(coefficient=balancing.coefficient)


def replays_routes(spec: RLJobSpec) -> bool:
    """Whether engines return routes, and the trainer replays them."""
    return spec.training.router_replay is RouterReplay.ENGINE


def critic_config(spec: RLJobSpec, policy: PolicyConfig) -> CriticConfig:
    """A critic's settings: those of a ``policy`` made for it, with all weights trained."""
    shared = {field.name: getattr(policy, field.name) for field in dataclasses.fields(PolicyConfig)}
    own = {
        "total_steps": spec.training.steps,
        "trainable": True,
        "lora": None,
        "loss": LossConfig(),
    }
    return CriticConfig(**(shared | own), value=ValueLossConfig(value_clip=spec.algorithm.critic.value_clip))


def has_critic(spec: RLJobSpec) -> bool:
    """Whether values are estimated and learned."""
    return spec.algorithm.advantage.estimator is AdvantageEstimator.GAE


def critic_warmup_steps(spec: RLJobSpec) -> int:
    """Steps at the beginning that train the critic alone."""
    return spec.algorithm.critic.warmup_steps if has_critic(spec) else 0


def sampling(spec: RLJobSpec) -> Sampling:
    """How training responses are sampled."""
    rollout = spec.rollout
    return Sampling(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k or 0,
        min_p=rollout.min_p,
        returns_mask=rollout.leaves_out_tokens,
        returns_routes=replays_routes(spec),
        stop_token_ids=rollout.stop_token_ids,
        stop_strings=rollout.stop_strings,
    )


def staleness_gate(spec: RLJobSpec, version: int) -> StalenessGate:
    """Admission from weights ``version`` on."""
    batch = spec.rollout.prompts_per_step
    return StalenessGate(
        groups_per_step=batch,
        async_generation_ratio=spec.overlap.async_generation_ratio,
        max_staleness=max_staleness(spec),
        spare=spec.rollout.extra_prompts,
        total_groups=batch * spec.training.steps,
        version=version,
    )


def engine_capacity(max_running_requests: int) -> Capacity:
    """What an engine that computes so many requests at the same time is given."""
    return Capacity(slots=max_running_requests, queued=max(max_running_requests // QUEUED_SHARE, MIN_QUEUED))


def rollout_config(spec: RLJobSpec, num_engines: Mapping[str, int], *, survives_engine_loss: bool = True) -> RolloutConfig:
    """What the scheduler needs.

    Args:
        spec: of the job.
        num_engines: engines of each rollout component, by its name, in the order in which the scheduler has them.
        survives_engine_loss: False where engines lease their devices: there the others cannot take over.
    """
    engines = {c.name: c.engine or Engine() for c in spec.components if c.name in num_engines}
    rollout = spec.rollout
    wanted = rollout.group_filter
    return RolloutConfig(
        samples_per_prompt=rollout.samples_per_prompt,
        redundant_samples=rollout.redundant_samples,
        group_filter=None if wanted is None else GroupFilter(min_mean=wanted.min_mean, max_mean=wanted.max_mean, min_std=wanted.min_std),
        max_filtered_in_row=1000 if wanted is None else wanted.max_in_row,
        sampling=sampling(spec),
        seed=spec.seed,
        fleet=FleetConfig(
            capacities=tuple(
                engine_capacity(engines[name].max_running_requests) for name, count in num_engines.items() for _ in range(count)
            ),
            stall_timeout_s=rollout.stall_timeout_seconds,
            affinity_margin=AFFINITY_MARGIN if any(engine.prefix_caching for engine in engines.values()) else 0,
            group_routing=rollout.group_routing,
            survives_engine_loss=survives_engine_loss and all(engine_adapter(engine.type).spares_lost for engine in engines.values()),
        ),
        drains=spec.overlap.update_mode is UpdateMode.DRAIN,
        drain_timeout_s=spec.training.step_timeout_seconds,
    )


def _text(folder: Path | None) -> str | None:
    return None if folder is None else str(folder)


def validation_config(spec: RLJobSpec) -> ValidationConfig:
    """When and how the policy is validated."""
    wanted = spec.validation
    return ValidationConfig(
        every_steps=wanted.every_steps,
        at_start=wanted.at_start,
        pauses=wanted.pause_generation,
        samples_per_prompt=wanted.samples_per_prompt,
        sampling=Sampling(
            max_tokens=wanted.max_response_tokens or spec.rollout.max_response_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            top_k=wanted.top_k,
            stop_token_ids=spec.rollout.stop_token_ids,
            stop_strings=spec.rollout.stop_strings,
        ),
        seed=spec.seed,
        timeout_s=spec.training.step_timeout_seconds,
    )
