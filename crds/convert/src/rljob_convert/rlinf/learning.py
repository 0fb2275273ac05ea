"""RLinf configurations: the learning rule, sampling, the trainer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

_ESTIMATORS = {
    "grpo": "GRPO",
    "grpo_dynamic": "GRPO",
    "math_grpo": "GRPO",
    "gae": "GAE",
    "math_gae": "GAE",
    "rloo": "RLOO",
    "reinforce": "Reinforce",
    "reinpp": "ReinforcePlusPlus",
    "reinforce_plus_plus": "ReinforcePlusPlus",
    "reinpp_baseline": "ReinforcePlusPlus",
}
_DISCOUNTING = ("GAE", "Reinforce", "ReinforcePlusPlus")
_LOSSES = {
    "actor": "PPO",
    "grpo": "PPO",
    "ppo": "PPO",
    "actor_critic": "PPO",
    "math_actor": "PPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
}
_AGGREGATIONS = {
    "token-mean": "TokenMean",
    "seq-mean-token-mean": "SeqMeanTokenMean",
    "seq-mean-token-sum": "SeqMeanTokenSum",
}
_PENALTIES = {"low_var_kl": "K3", "k3": "K3", "kl": "K1", "k1": "K1", "mse": "K2", "k2": "K2", "abs": "Abs"}
_SCHEDULES = {"constant": "Constant", "linear": "Linear", "cosine": "Cosine", "constant_with_warmup": "Constant"}
DEFAULT_STEPS = 100
_WHOLE_VOCABULARY = 100_000
"""RLinf's files write top_k 1000000 for sampling from all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The learning rule."""

    section: Section
    kl_coefficient: float


def algorithm(source: Source, *, has_critic: bool) -> Rule:
    """Advantage, loss and KL.

    Args:
        source: the configuration.
        has_critic: whether a component is one.
    """
    where = ("algorithm",)
    written = source.peek(*where, "adv_type")
    estimator = source.choice(_ESTIMATORS, *where, "adv_type")
    if written == "grpo_dynamic":
        source.differs((*where, "adv_type"), f"becomes {estimator}, the nearest estimator", "check algorithm.advantage")
    if estimator is None:
        estimator = source.assume((*where, "adv_type"), "GRPO", "the file names no estimator that RLJob has", "check algorithm.advantage")
    clip = source.number(*where, "ratio_clip_eps", high=1.0)
    low, high = source.number(*where, "clip_ratio_low", high=1.0), source.number(*where, "clip_ratio_high", high=100.0)
    kl = _kl(source, estimator)
    has_baseline = estimator == "ReinforcePlusPlus" and source.flag(*where, "use_reinpp_baseline")
    section = compact(
        {
            "advantage": _advantage(source, estimator),
            "reward": {"center": "Group"} if has_baseline or written == "reinpp_baseline" else None,
            "policyLoss": compact(
                {
                    "variant": source.choice(_LOSSES, *where, "loss_type"),
                    "clipLow": clip if low is None else low,
                    "clipHigh": clip if high is None else high,
                    "dualClip": source.number(*where, "clip_ratio_c", above=1.0, high=1000.0),
                    "aggregation": source.choice(_AGGREGATIONS, *where, "loss_agg_func"),
                }
            ),
            "kl": kl,
            "entropyCoefficient": source.number(*where, "entropy_bonus") or None,
        }
    )
    if estimator == "GAE" and not has_critic:
        source.differs((*where, "adv_type"), "needs a critic, and the file places none", "add a component with role: Critic")
    if estimator == "GAE":
        section = {**section, "critic": _critic(source)}
    return Rule(section=compact(section), kl_coefficient=kl.get("coefficient", 0.0))


def _advantage(source: Source, estimator: str) -> Section:
    where = ("algorithm",)
    gamma = source.number(*where, "gamma", high=1.0) if estimator in _DISCOUNTING or source.peek(*where, "gamma") in (1, 1.0) else None
    whiten = source.flag(*where, "normalize_advantages")
    if whiten and estimator == "ReinforcePlusPlus":
        source.drop((*where, "normalize_advantages"), f"estimator {estimator} normalizes them itself")
    return compact(
        {
            "estimator": estimator,
            "gamma": None if gamma == 1 else gamma,
            "lambda": source.number(*where, "gae_lambda", high=1.0) if estimator == "GAE" else None,
            "whiten": whiten if estimator == "GAE" else True if whiten and estimator != "ReinforcePlusPlus" else None,
        }
    )


def _kl(source: Source, estimator: str) -> Section:
    """One penalty: in the loss, or in the rewards of REINFORCE++."""
    where = ("algorithm",)
    in_loss = source.number(*where, "kl_beta") or 0.0
    in_rewards = (source.number(*where, "reinpp_kl_beta") or 0.0) if estimator == "ReinforcePlusPlus" else 0.0
    estimate = source.choice(_PENALTIES, *where, "kl_penalty_type")
    if in_loss and in_rewards:
        source.drop((*where, "reinpp_kl_beta"), "kl_beta adds the KL to the loss, and RLJob has one KL term")
    if in_loss:
        return compact({"coefficient": in_loss, "estimator": estimate})
    return compact({"coefficient": in_rewards, "estimator": estimate, "placement": "Reward"}) if in_rewards else {}


def _critic(source: Source) -> Section:
    return compact(
        {
            "learningRate": source.number("actor", "optim", "value_lr", above=0.0),
            "valueClip": source.number("algorithm", "value_clip", above=0.0),
        }
    )


def rollout(source: Source) -> Section:
    """Batch sizes and sampling."""
    params = ("algorithm", "sampling_params")
    samples = source.integer("algorithm", "group_size", low=1, high=4096)
    if samples is None:
        samples = source.assume(("algorithm", "group_size"), 8, "the file does not say", "set rollout.samplesPerPrompt")
    temperature = source.number(*params, "temperature", high=10.0)
    if temperature == 0:
        source.differs((*params, "temperature"), "greedy sampling cannot be trained on, 1.0 is used", "choose rollout.temperature")
        temperature = 1.0
    top_k = source.integer(*params, "top_k", low=-1)
    prompt = source.integer("data", "max_prompt_length", low=1, high=10_000_000)
    response = source.integer(*params, "max_new_tokens", low=1, high=10_000_000)
    total = source.integer("runner", "seq_length", low=2, high=10_000_000)
    if response is None and total is not None and prompt is not None and total > prompt:
        response = total - prompt
    return compact(
        {
            "promptsPerStep": source.integer("data", "rollout_batch_size", low=1),
            "samplesPerPrompt": samples,
            "maxPromptTokens": prompt,
            "maxResponseTokens": response,
            "temperature": temperature,
            "topP": source.number(*params, "top_p", above=0.0, high=1.0),
            "topK": top_k if top_k is not None and 0 < top_k < _WHOLE_VOCABULARY else None,
        }
    )


def training(source: Source, generation: Section) -> Section:
    """The trainer's settings; ``generation`` is the section rollout."""
    steps = _steps(source)
    optim, schedule = ("actor", "optim"), _schedule(source)
    tensor = source.integer("actor", "model", "tensor_model_parallel_size", low=1, high=64) or 1
    return compact(
        {
            "steps": steps,
            "learningRate": source.number(*optim, "lr", above=0.0),
            "schedule": schedule,
            "warmupSteps": _warmup(source, steps, common.most_warmup(steps, schedule)),
            "beta1": source.number(*optim, "adam_beta1", high=0.999_999),
            "beta2": source.number(*optim, "adam_beta2", high=0.999_999),
            "epsilon": source.number(*optim, "adam_eps", above=0.0),
            "weightDecay": source.number(*optim, "weight_decay"),
            "maxGradNorm": source.number(*optim, "clip_grad", above=0.0),
            "miniBatches": _mini_batches(source, generation),
            "microBatchTokens": _micro_batch(source),
            "activationCheckpointing": _checkpointing(source),
            "tensorParallelSize": tensor if tensor > 1 else None,
        }
    )


def _steps(source: Source) -> int:
    steps = source.integer("runner", "max_steps", low=-1)
    epochs = source.integer("runner", "max_epochs", low=-1)
    if steps is not None and steps > 0:
        if epochs is not None:
            source.drop(("runner", "max_epochs"), f"max_steps {steps} counts; RLinf stops at whichever comes first")
        return steps
    if epochs is not None:
        source.drop(("runner", "max_epochs"), "RLJob counts steps: epochs * prompts of the data / promptsPerStep", "set training.steps")
    return source.assume(("runner", "max_steps"), DEFAULT_STEPS, "the file does not bound the steps", "set training.steps")


def _schedule(source: Source) -> str | None:
    old, new = ("actor", "lr_sched", "lr_decay_style"), ("actor", "optim", "lr_scheduler")
    first = source.choice(_SCHEDULES, *old)
    second = source.choice(_SCHEDULES, *new)
    if first is not None and second is not None and first != second:
        source.drop(new, f"lr_sched.lr_decay_style counts, {first}")
    return first or second


def _warmup(source: Source, steps: int, most: int) -> int | None:
    optim = ("actor", "optim")
    for where in (("actor", "lr_sched", "lr_warmup_iters"), (*optim, "lr_warmup_steps")):
        number = source.integer(*where)
        if number:
            for ratio in (("actor", "lr_sched", "lr_warmup_fraction"), (*optim, "lr_warmup_steps_ratio")):
                if source.has(*ratio):
                    source.drop(ratio, f"{where[-1]} {number} counts")
            if number > most:
                source.differs(where, f"is cut to {most} of the {steps} steps of the job")
            return min(number, most)
    for where in (("actor", "lr_sched", "lr_warmup_fraction"), (*optim, "lr_warmup_steps_ratio")):
        ratio_value = source.number(*where, high=1.0)
        if ratio_value is not None:
            return min(most, common.whole_steps(source, where, ratio_value, steps) or 0)
    return None


def _mini_batches(source: Source, generation: Section) -> int | None:
    where = ("algorithm", "n_minibatches")
    number = source.integer(*where, low=1)
    prompts = generation.get("promptsPerStep", 32)
    if number is None:
        return None
    result = common.largest_divisor(prompts, number)
    if result != number:
        source.differs(where, f"does not divide {prompts} prompts, {result} is used", "check training.miniBatches")
    return result


def _micro_batch(source: Source) -> int | None:
    most = source.integer("runner", "max_tokens_per_mbs", low=1, high=100_000_000)
    size_at = ("algorithm", "training_batch_size_per_gpu")
    size = source.integer(*size_at, low=1)
    length = source.integer("runner", "seq_length", low=1, high=10_000_000)
    is_dynamic = source.flag("runner", "enable_dynamic_batch_size")
    if is_dynamic and most is not None:
        if size is not None:
            source.drop(size_at, "batches are dynamic, max_tokens_per_mbs counts")
        return most
    if most is not None:
        source.drop(("runner", "max_tokens_per_mbs"), "enable_dynamic_batch_size is off")
    if size is None:
        return None
    if length is None:
        source.drop(size_at, "without seq_length it is no number of tokens", "set training.microBatchTokens")
        return None
    tokens = min(size * length, 100_000_000)
    source.differs(size_at, f"{size} sequences of full length become at most {tokens} tokens per pass", "check training.microBatchTokens")
    return tokens


def _checkpointing(source: Source) -> bool | None:
    flag = source.flag("actor", "fsdp_config", "gradient_checkpointing")
    where = ("actor", "model", "recompute_granularity")
    granularity = source.choice(common.GRANULARITIES, *where)
    if granularity == "selective":
        source.differs(where, "becomes activationCheckpointing, which recomputes whole layers")
    return flag if flag is not None else (True if granularity else None)
