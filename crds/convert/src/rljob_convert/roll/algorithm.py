"""ROLL configurations: the learning rule, from rewards to the loss.

What ROLL computes: its source (https://github.com/alibaba/ROLL, main of August 2026), ``roll/utils/functionals.py`` and the workers of
``roll/pipeline/rlvr``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rljob_convert.common import Section, compact
from rljob_convert.roll.credit import credit
from rljob_convert.roll.distillation import Distilled, without_scores
from rljob_convert.roll.learning import SCHEDULES, Batch, critic_updates, epsilon, min_learning_rate, warmup_steps
from rljob_convert.roll.placement import reward_places
from rljob_convert.source import Source

_ESTIMATORS = {
    "grpo": "GRPO",
    "gae": "GAE",
    "reinforce": "Reinforce",
}
_DISCOUNTING = ("GAE", "Reinforce")
_VARIANTS = {"ppo": "PPO", "vanilla": "Vanilla", "tis": "TIS", "topr": "TOPR", "cispo": "CISPO", "kimi15": "Kimi15"}
_AGGREGATIONS = {
    "token-mean": "TokenMean",
    "seq-mean-token-mean": "SeqMeanTokenMean",
    "seq-mean-token-sum": "SeqMeanTokenSum",
    "seq-mean-token-sum-norm": "SeqMeanTokenSumNorm",
}
_PENALTIES = {"kl": "K1", "abs": "Abs", "mse": "K2", "full": "K1"}
_SCOPES = {"batch": "Batch", "group": "Group", "running": "Running"}
_LEVELS = {"token": "Token", "sequence": "Sequence", "geometric": "Geometric", "segment": "Segment"}
_CORRECTION = "train_infer_correction"
MAX_RATIO = 1e6
"""Stands for no bound of an importance ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The learning rule."""

    section: Section
    kl_coefficient: float

    @property
    def needs_critic(self) -> bool:
        """Whether values are estimated."""
        return bool(self.section.get("advantage", {}).get("estimator") == "GAE")

    @property
    def penalizes_rewards(self) -> bool:
        """Whether a KL is taken from rewards."""
        return bool(self.section.get("kl", {}).get("placement") == "Reward")


def algorithm(source: Source, numbers: Batch, *, is_agentic: bool, teacher: Distilled | None = None) -> Rule:
    """All of the learning rule but the correction, which depends on how many updates a step has."""
    masks = _masking(source, numbers, is_agentic=is_agentic)
    if teacher is not None and teacher.is_pure:
        rule: Section = {"advantage": _advantage(source, "Reinforce"), "policyLoss": _policy_loss(source), **masks}
        rule["entropyCoefficient"] = source.number("entropy_loss_coef") or None
        return Rule(section=compact({**without_scores(source, rule), "distillation": teacher.section}), kl_coefficient=0.0)
    if is_agentic:
        given = credit(source, numbers)
        estimator, reward = given.estimator, compact({**given.reward, "clip": source.number("reward_clip", above=0.0)})
    else:
        given = None
        estimator = _estimator(source)
        reward = _reward(source, estimator, numbers)
    kl, coefficient = _kl_or_none(source) if teacher is None else (None, 0.0)  # ROLL's reference is then the teacher
    between = [*(["a cut"] if reward else []), *(["the KL of tokens"] if kl is not None and kl.get("placement") == "Reward" else [])]
    if estimator == "GRPO" and between:  # ROLL cuts scores that their group has normalized, and then takes the KL from them
        why = f"becomes Reinforce with scores normalized over their group, which is GRPO with {' and '.join(between)} after it"
        source.differs(("adv_estimator",), why)
        estimator, reward = "Reinforce", {"center": "Group", "scale": "Group", **reward}
    section = compact(
        {
            "advantage": {**_advantage(source, estimator), **(given.advantage if given is not None else {})},
            "reward": reward,
            "policyLoss": _policy_loss(source),
            "kl": kl,
            "distillation": None if teacher is None else teacher.section,
            **masks,
            "entropyCoefficient": source.number("entropy_loss_coef") or None,
            "critic": _critic(source) if estimator == "GAE" else None,
        }
    )
    if not is_agentic and len(reward_places(source)) > 1:
        _note_domains(source, section)
    return Rule(section=section, kl_coefficient=coefficient)


def _note_domains(source: Source, section: Section) -> None:
    """ROLL computes statistics of rewards and of advantages for each domain by itself (``rlvr_pipeline.py``)."""
    rewards = section.get("reward", {})
    taken = {"norm_mean_type": rewards.get("center"), "norm_std_type": rewards.get("scale")}
    wholes = [key for key, scope in taken.items() if scope == "Batch"]
    for key in (*wholes, *(["whiten_advantages"] if section["advantage"].get("whiten") else [])):
        source.differs((key,), "is over all responses of a step; ROLL takes those of each domain of rewards by themselves")


def _estimator(source: Source) -> str:
    estimator = source.choice(_ESTIMATORS, "adv_estimator")
    if estimator is None:
        if source.keys("critic"):
            estimator = source.assume(("adv_estimator",), "GAE", "ROLL's default is gae")
        else:
            why = "ROLL's default is gae, which needs a critic, and the file has none"
            estimator = source.assume(("adv_estimator",), "Reinforce", why, "choose algorithm.advantage.estimator")
    return estimator


def _reward(source: Source, estimator: str, numbers: Batch) -> Section:
    """Normalization of scores and their cut."""
    fields: Section = {}
    for key, field in (("norm_mean_type", "center"), ("norm_std_type", "scale")):
        if estimator == "GRPO":
            if source.peek(key) == "group":
                source.take(key)
            elif source.has(key):
                source.drop((key,), "ROLL forces group with grpo")
            continue
        scope = source.choice(_SCOPES, key)
        if scope == "Group" and numbers.samples < 2:
            source.drop((key,), "a group is a single response, num_return_sequences_in_group is 1")
        else:
            fields[field] = scope
    return compact({**fields, "clip": source.number("reward_clip", above=0.0)})


def _advantage(source: Source, estimator: str) -> Section:
    gamma = source.number("gamma", high=1.0) if estimator in _DISCOUNTING or source.peek("gamma") in (1, 1.0) else None
    return compact(
        {
            "estimator": estimator,
            "gamma": None if gamma == 1 else gamma,
            "lambda": source.number("lambd", high=1.0) if estimator == "GAE" else None,
            "whiten": source.flag("whiten_advantages") or (False if estimator == "GAE" else None),  # RLJob whitens GAE by default
            "clip": source.number("advantage_clip", above=0.0),
        }
    )


def _critic(source: Source) -> Section:
    """The critic's own optimizer: where the file has no key, ROLL's default counts and not what the policy has."""
    where = ("critic", "training_args")
    rate = source.number(*where, "learning_rate", above=0.0)
    if rate is None:
        rate = source.assume((*where, "learning_rate"), 5e-5, "ROLL's default")
    schedule = source.choice(SCHEDULES, *where, "lr_scheduler_type")
    if schedule is None:
        schedule = source.assume((*where, "lr_scheduler_type"), "Linear", "ROLL's default")
    decay = source.number(*where, "weight_decay")
    return compact(
        {
            "learningRate": rate,
            "minLearningRate": min_learning_rate(source, "critic", rate, schedule),
            "schedule": schedule,
            "learningRateWarmupSteps": 0,  # see critic_in_steps
            "beta1": source.number(*where, "adam_beta1", high=0.999_999),
            "beta2": source.number(*where, "adam_beta2", high=0.999_999),
            "epsilon": epsilon(source, "critic"),
            "weightDecay": 0.0 if decay is None else decay,
            "valueClip": source.number("value_clip", above=0.0),
            "warmupSteps": source.integer("critic_warmup") or None,
        }
    )


def critic_in_steps(source: Source, rule: Rule, numbers: Batch, devices: int) -> Section:
    """The learning rule with the critic's warm-up in steps of the job; ``devices``: of the critic."""
    if not rule.needs_critic:
        return rule.section
    warmup = warmup_steps(source, ("critic", "training_args"), critic_updates(source, numbers, devices))
    return {**rule.section, "critic": {**rule.section["critic"], "learningRateWarmupSteps": warmup or 0}}


def _policy_loss(source: Source) -> Section:
    variant = _variant(source)
    ratio = source.peek("importance_sampling")
    if ratio in ("seq", "token") and variant == "PPO":
        source.take("importance_sampling")
        variant = "GSPO" if ratio == "seq" else variant
    mode = source.peek("loss_agg_mode")
    aggregation = source.choice(_AGGREGATIONS, "loss_agg_mode")
    if mode == "seq-mean-token-sum-norm":
        source.differs(("loss_agg_mode",), "divides by rollout.maxResponseTokens, where ROLL divides by the width of its padded batch")
    if aggregation is None:
        aggregation = source.assume(("loss_agg_mode",), "SeqMeanTokenMean", "ROLL's default")
    return compact({"variant": variant, **_knobs(source, variant), "aggregation": aggregation})


def _variant(source: Source) -> str:
    """``pg_variant``, which ROLL reads in its policy-gradient workers alone; its others train with PPO."""
    where = ("actor_train", "pg_variant") if source.has("actor_train", "pg_variant") else ("pg_variant",)
    worker = str(source.peek("actor_train", "worker_cls") or "")
    if where[0] == "actor_train" and source.peek("pg_variant") == source.peek(*where):
        source.take("pg_variant")
    if source.has(*where) and worker.startswith("roll.") and "pg_worker" not in worker:
        source.drop(where, f"{worker.rsplit('.', 1)[-1]} does not read it and trains with PPO", "set algorithm.policyLoss.variant")
        return "PPO"
    variant = source.choice(_VARIANTS, *where) or "PPO"
    if source.has(*where) and not worker and variant != "PPO":
        source.differs(where, "counts here; ROLL reads it with worker_cls ActorPGWorker alone, and trains with PPO without")
    return variant


def _knobs(source: Source, variant: str) -> Section:
    """What one variant alone reads; keys of the others end in notes."""
    if variant in ("PPO", "GSPO"):
        low, high = _clips(source)
        dual = 0.0  # RLJob's default is 3
        if source.flag("dual_clip_loss"):
            clip = source.number("pg_clip", above=0.0, high=100.0) or 0.2
            dual = 1 + 2 * clip
            source.differs(("dual_clip_loss",), f"becomes the bound ROLL computes, 1 + 2 * pg_clip = {dual:g}")
        return {"clipLow": 0.2 if low is None else low, "clipHigh": 0.2 if high is None else high, "dualClip": dual}  # pg_clip's default
    if variant in ("TIS", "CISPO"):
        keys = ("tis_lower_bound", "tis_upper_bound") if variant == "TIS" else ("cispo_epsilon_low", "cispo_epsilon_high")
        low, high = _variant_clips(source, variant, *keys)
        mask = _documented_flag(source, "cispo_use_unified_mask") if variant == "CISPO" else None
        return {"clipLow": low, "clipHigh": high, "maskClipped": mask or None}
    if variant == "TOPR":
        return {f"{side}Weight": source.number(*_place(source, f"topr_{side}_weight")) for side in ("positive", "negative")}
    if variant == "Kimi15":
        tau = source.number(*_place(source, "kimi15_tau"))
        if tau is not None:
            source.differs(_place(source, "kimi15_tau"), "has effect here; ROLL's loader drops it and uses 0.1", "check policyLoss.tau")
        return {"tau": tau}
    return {}


def _place(source: Source, key: str) -> tuple[str, ...]:
    """Where a key of a variant is written: in the Trainer's section, as ROLL reads it, or at the top, as its documentation has it."""
    return ("actor_train", key) if source.has("actor_train", key) else (key,)


def _documented_flag(source: Source, key: str) -> bool | None:
    value = source.flag(*_place(source, key))
    if value:
        source.differs(_place(source, key), "has effect here; ROLL's loader drops it")
    return value


def _clips(source: Source) -> tuple[float | None, float | None]:
    if source.peek("use_pg_clip_range") is False:
        source.take("use_pg_clip_range")
    if source.flag("use_pg_clip_range"):
        low = source.number("pg_clip_low", high=1.0)
        high = source.number("pg_clip_high", high=100.0)
        if source.has("pg_clip") and not source.peek("dual_clip_loss"):
            source.drop(("pg_clip",), "use_pg_clip_range makes pg_clip_low and pg_clip_high count")
        return low, high
    for key in ("pg_clip_low", "pg_clip_high"):
        if source.has(key):
            source.drop((key,), "ROLL uses it only with use_pg_clip_range")
    clip = source.number("pg_clip", high=1.0)
    return clip, clip


def _variant_clips(source: Source, variant: str, low_key: str, high_key: str) -> tuple[float, float]:
    """Bounds of TIS and CISPO as distances from 1; ROLL's documentation gives them, its loader drops them."""
    values: list[float] = []
    for key, default in ((low_key, 0.0 if variant == "TIS" else 0.1), (high_key, 1.0 if variant == "TIS" else 0.1)):
        where = _place(source, key)
        value = source.number(*where, high=1.0 if key == low_key else 101.0)
        if value is None:
            value = source.assume((key,), default, f"ROLL's default with {variant}")
        else:
            source.differs(where, f"has effect here; ROLL's loader drops it and uses {default:g}", "check clipLow and clipHigh")
        if variant == "TIS" and key == high_key and value < 1:
            source.differs(where, "is below 1, and RLJob's upper bound is 1 + clipHigh; 1 is used", "check clipHigh")
        values.append(value)
    low, high = values
    return (1.0 - low, max(0.0, high - 1.0)) if variant == "TIS" else (low, high)


def _kl_or_none(source: Source) -> tuple[Section | None, float]:
    if any(source.has(key) for key in ("init_kl_coef", "add_token_level_kl", "use_kl_loss", "reference")):
        return _kl(source)
    why = "ROLL's default is 0.2, so it loads a reference although the file maps none and nothing uses it; left out"
    source.assume(("init_kl_coef",), 0, why, "add a Reference component and algorithm.kl.coefficient for a penalty")
    return None, 0.0


def _kl(source: Source) -> tuple[Section | None, float]:
    loss_at = ("kl_loss_coef",)
    if source.peek("add_token_level_kl") is False:
        source.take("add_token_level_kl")
    if source.flag("use_kl_loss"):
        coefficient = source.number(*loss_at)
        if coefficient is None:
            coefficient = source.assume(loss_at, 0.0, "ROLL's default, so use_kl_loss has no effect")
        if coefficient:
            _drop_reward_kl(source, "use_kl_loss adds the KL to the loss, and RLJob has one KL term")
            return {"coefficient": coefficient, "estimator": "K3"}, coefficient
    elif source.has(*loss_at):
        source.drop(loss_at, "use_kl_loss is off")
    if not source.flag("add_token_level_kl"):
        _drop_reward_kl(source, "no KL is added to the loss or to rewards, so ROLL loads a reference and trains without it")
        return None, 0.0
    initial = source.number("init_kl_coef")
    if initial is None:
        initial = source.assume(("init_kl_coef",), 0.2, "ROLL's default")
    if not initial:
        _drop_reward_kl(source, "init_kl_coef is 0")
        return None, 0.0
    if source.peek("kl_penalty") == "full":
        source.differs(("kl_penalty",), "full has no equivalent, K1 is used", "choose algorithm.kl.estimator")
    target = source.number("target_kl", above=0.0)
    section = {
        "coefficient": initial,
        "estimator": source.choice(_PENALTIES, "kl_penalty") or "K1",
        "placement": "Reward",
        "target": target,
        "horizon": source.integer("kl_horizon", low=1) if target is not None else None,
    }
    return compact(section), initial


def _drop_reward_kl(source: Source, why: str) -> None:
    for key in ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon"):
        if source.peek(key) in (0, 0.0) and key == "init_kl_coef":
            source.take(key)
        elif source.has(key):
            source.drop((key,), why)


_MASKS = ("max_len_mask", "difficulty_mask", "error_max_len_clip", "difficulty_loss_weight", "length_loss_weight")
"""Switches of the RLVR pipeline."""


def _masking(source: Source, numbers: Batch, *, is_agentic: bool) -> Section:
    """Which samples count, and how much; ROLL's agentic pipeline keeps all alike (``get_agentic_response_level_mask``)."""
    if not is_agentic:
        return {"filters": _filters(source, numbers), "sampleWeights": _sample_weights(source)}
    for key in (*_MASKS, "difficulty_low_threshold", "difficulty_high_threshold", "error_max_len_threshold"):
        if source.has(key) and source.peek(key) is not False:
            source.drop((key,), "ROLL's agentic pipeline does not read it", "set algorithm.filters or sampleWeights")
        else:
            source.take(key)
    return {}


def _filters(source: Source, numbers: Batch) -> Section:
    low = high = failed = None
    if source.peek("difficulty_mask") is True and numbers.samples < 2:
        source.drop(("difficulty_mask",), "a group is a single response, num_return_sequences_in_group is 1, and ROLL keeps it")
    elif source.flag("difficulty_mask"):
        low, high = source.number("difficulty_low_threshold", low=-1e6, high=1e6), source.number("difficulty_high_threshold", high=1e6)
        low, high = 0.0 if low is None else low, 1.0 if high is None else high
    if source.flag("error_max_len_clip"):
        failed = _failed_tokens(source, numbers)
    return compact({"truncated": source.flag("max_len_mask") or None, "minGroupMean": low, "maxGroupMean": high, "maxFailedTokens": failed})


def _failed_tokens(source: Source, numbers: Batch) -> int | None:
    """``error_max_len_threshold``, from which on failed responses do not count; None where none is so long.

    ROLL keeps scores of exactly 1, and of exactly 0 below the threshold (``get_sample_level_mask``); RLJob asks whether a response passed.
    """
    switch, where = ("error_max_len_clip",), ("error_max_len_threshold",)
    failed, rest = source.integer(*where, low=1, high=10**10), "ROLL also leaves out scores other than 0 and 1, which RLJob keeps"
    if failed is None:
        why = "its error_max_len_threshold cannot be used" if source.has(*where) else "without error_max_len_threshold none is too long"
        source.drop(switch, f"{why}; {rest}", "set algorithm.filters")
        return None
    if failed > numbers.response_tokens:
        source.drop(where, f"no response is longer than {numbers.response_tokens} tokens; {rest}")
        return None
    source.differs(switch, f"is about responses that did not pass; {rest} if they are short", "check your scores")
    return failed


def _sample_weights(source: Source) -> Section:
    return compact({"difficulty": source.flag("difficulty_loss_weight") or None, "length": source.flag("length_loss_weight") or None})


def off_policy(source: Source, rule: Rule, updates: int) -> Section | None:
    """The correction between trainer and engines; ROLL takes it between the policy at the beginning of the step and the engines.

    ROLL computes that policy's log-probs where it is configured to, and by itself where a step has more than one update.

    Args:
        source: the configuration.
        rule: the rest of the learning rule.
        updates: of one step.
    """
    weight, masks = _weight(source), _masks(source)
    ask, forbid = ("enable_old_logprobs_recompute",), ("force_disable_old_logprobs_recompute",)
    asked, forbidden = source.flag(*ask), source.flag(*forbid)
    if weight or masks:
        for where, value in ((ask, asked is False), (forbid, forbidden)):
            if value:
                source.differs(where, "is computed all the same: the correction is between that policy and the engines")
        return compact({"proximal": "Recompute", "weight": weight, "masks": masks})
    has_ratio = rule.section["policyLoss"]["variant"] != "Vanilla"
    if forbidden:
        source.drop(forbid, "RLJob's ratios are taken against the engine's own log-probs unless algorithm.offPolicy.proximal says more")
        if asked:
            source.drop(ask, "force_disable_old_logprobs_recompute counts")
        return None
    if updates > 1 and has_ratio:
        why = "ROLL recomputes by itself where a step has several updates"
        if asked is None:
            source.assume(ask, True, why, "remove algorithm.offPolicy.proximal for ratios against the engine's own log-probs")
        elif not asked:
            source.differs(ask, f"is on all the same: {why}")
        return {"proximal": "Recompute"}
    if asked and rule.penalizes_rewards:  # which are measured with it
        return {"proximal": "Recompute"}
    if asked:
        why = "with one update per step the ratio would be 1 everywhere" if has_ratio else "vanilla has no ratio"
        source.drop(ask, f"{why}; RLJob's ratios are taken against the engine's own log-probs")
    if has_ratio:
        _say_ratio(source)
    return None


def _say_ratio(source: Source) -> None:
    """With one update per step ROLL's ratio is that of a policy to itself (``get_old_log_probs_with_cache`` of its base_worker.py)."""
    why = "with one update per step ROLL's ratio is 1, it never clips; RLJob's is against the log-probs of the engine that sampled"
    remedy = "write algorithm.policyLoss.variant: Vanilla for ROLL's gradient, which corrects nothing"
    source.assume(("actor_train", "old_log_probs"), "the engine's", why, remedy)


def _weight(source: Source) -> Section | None:
    where = (_CORRECTION, "is_weight")
    if not source.flag(*where, "enabled"):
        return None
    level = source.choice(_LEVELS, *where, "weight_type") or "Token"
    high = source.number(*where, "upper_bound", above=0.0, high=MAX_RATIO)
    if high is None:
        without = source.peek(_CORRECTION, "is_weight") and "upper_bound" in source.keys(*where)
        high = MAX_RATIO if without else source.assume((*where, "upper_bound"), 1.2, "ROLL's default")
    if source.peek(*where, "detach") is True:
        source.take(*where, "detach")
    elif source.has(*where, "detach"):
        source.drop((*where, "detach"), "RLJob's weights carry no gradient")
    return {"level": level, "high": high}


def _masks(source: Source) -> list[Section]:
    """ROLL may bound one level several times; what is inside of all is inside of the narrowest bounds."""
    where, bounds = (_CORRECTION, "filters"), dict[str, tuple[float, float]]()
    for index in range(source.length(*where)):
        here = (*where, index)
        if not source.flag(*here, "enabled"):
            continue
        if source.flag(*here, "diff_enabled"):
            why = "RLJob bounds ratios of probabilities, not their differences"
            source.drop((*here, "diff_enabled"), why, "set algorithm.offPolicy.masks")
        if source.flag(*here, "ratio_enabled") is False:
            continue
        level = source.choice(_LEVELS, *here, "agg_type") or "Token"
        given_low, given_high = source.number(*here, "ratio_low", high=MAX_RATIO), source.number(*here, "ratio_high", high=MAX_RATIO)
        low, high = 0.8 if given_low is None else given_low, 1.2 if given_high is None else given_high
        before = bounds.get(level, (0.0, math.inf))
        bounds[level] = max(before[0], low), min(before[1], high)
    return [{"level": level, "low": low, "high": high} for level, (low, high) in bounds.items()]
