"""ROLL configurations: batch sizes, the learning rule, the trainer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.convert import common
from rljob_api.convert.common import Section, compact
from rljob_api.convert.source import Source

_ARGS = ("actor_train", "training_args")
_CONFIG = ("actor_train", "strategy_args", "strategy_config")
_ESTIMATORS = {
    "grpo": "GRPO",
    "gae": "GAE",
    "reinforce": "Reinforce",
    "gigpo": "GiGPO",
    "step_reinforce": "StepReinforce",
    "agentic_reinforce": "Reinforce",
}
_VARIANTS = {"ppo": "PPO", "vanilla": "Vanilla", "tis": "TIS", "topr": "TOPR", "cispo": "CISPO", "kimi15": "Kimi15"}
_AGGREGATIONS = {
    "token-mean": "TokenMean",
    "seq-mean-token-mean": "SeqMeanTokenMean",
    "seq-mean-token-sum": "SeqMeanTokenSum",
    "seq-mean-token-sum-norm": "SeqMeanTokenSum",
}
_PENALTIES = {"kl": "K1", "abs": "K1", "mse": "K2", "full": "K1"}
_SCHEDULES = {
    "linear": "Linear",
    "cosine": "Cosine",
    "constant": "Constant",
    "constant_with_warmup": "Constant",
    "cosine_with_min_lr": "Cosine",
}
_GROUPS = ("grpo", "gigpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sizes of one step."""

    prompts: int
    samples: int
    """Responses per prompt."""
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The learning rule."""

    section: Section
    kl_coefficient: float


def batch(source: Source, *, is_agentic: bool) -> Batch:
    """Prompts, samples and lengths of one step."""
    size = source.integer("rollout_batch_size", low=1)
    if size is None:
        size = source.assume(("rollout_batch_size",), 128, "ROLL's default; negative numbers are not converted")
    samples = _group_size(source) if is_agentic else _samples(source)
    prompts = size
    if is_agentic:
        prompts = max(1, size // samples)
        if source.has("rollout_batch_size"):
            left = f", {size % samples} trajectories are left out" if size % samples else ""
            source.differs(
                ("rollout_batch_size",), f"{size} trajectories become {prompts} prompts of {samples} samples each{left}", "check both"
            )
    prompt_tokens, response_tokens = _lengths(source, is_agentic=is_agentic)
    return Batch(prompts=prompts, samples=samples, prompt_tokens=prompt_tokens, response_tokens=response_tokens)


def _samples(source: Source) -> int:
    samples = source.integer("num_return_sequences_in_group", low=1, high=4096)
    if samples is None:
        samples = source.assume(("num_return_sequences_in_group",), 1, "ROLL's default")
    where = ("actor_infer", "generating_args", "num_return_sequences")
    if source.peek(*where) == samples:
        source.take(*where)
    elif source.has(*where):
        source.drop(where, f"ROLL overwrites it with num_return_sequences_in_group, {samples}")
    return samples


def _group_size(source: Source) -> int:
    where = ("actor_infer", "generating_args", "num_return_sequences")
    if source.peek(*where) == 1:
        source.take(*where)
    elif source.has(*where):
        source.drop(where, "agentic jobs draw one response per turn")
    size = source.integer("train_env_manager", "group_size", low=1, high=4096)
    if size is not None:
        return size
    needs_groups = str(source.peek("adv_estimator")) in _GROUPS
    if needs_groups and not source.has("train_env_manager"):
        why = "the file has no train_env_manager, and the estimator compares the members of a group"
        return source.assume(("train_env_manager", "group_size"), 8, why, "set rollout.samplesPerPrompt")
    return source.assume(("train_env_manager", "group_size"), 1, "ROLL's default")


def _lengths(source: Source, *, is_agentic: bool) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    prompt = source.integer("prompt_length", low=1, high=10_000_000)
    response = source.integer("response_length", low=1, high=10_000_000)
    total = source.integer("sequence_length", low=2, high=10_000_000)
    turn_at = ("actor_infer", "generating_args", "max_new_tokens")
    turn = source.integer(*turn_at, low=1, high=10_000_000)
    if is_agentic and total is not None:
        if turn is None or turn >= total:
            turn = source.assume(turn_at, max(1, total // 4), "a turn needs a bound below sequence_length", "set rollout.maxResponseTokens")
        why = f"becomes maxPromptTokens {total - turn} (what a turn sees) plus maxResponseTokens {turn} (what it writes)"
        source.differs(("sequence_length",), why)
        return total - turn, turn
    if prompt is None:
        default = 1024 if total is None else min(1024, total - 1)
        prompt = source.assume(("prompt_length",), default, "ROLL's default" if default == 1024 else "fits into sequence_length")
    if response is not None:
        if total is not None and total != prompt + response:
            source.drop(("sequence_length",), f"response_length {response} counts: ROLL sets it to {prompt} + {response}")
    elif total is not None and total > prompt:
        response = total - prompt
    else:
        default = turn or 8192
        response = source.assume(("response_length",), default, "ROLL requires response_length or sequence_length", "set it")
    if turn is not None and turn != response and not is_agentic:
        source.drop(turn_at, f"ROLL overwrites it with {response}, what prompt_length leaves of a sequence")
    return prompt, response


def algorithm(source: Source, numbers: Batch) -> Rule:
    """Advantage, loss and KL."""
    estimator = _estimator(source)
    if source.has("init_kl_coef") or source.has("add_token_level_kl") or source.has("use_kl_loss") or source.has("reference"):
        kl, coefficient = _kl(source)
    else:
        kl, coefficient = None, 0.0
        why = "ROLL's default is 0.2, so it loads a reference although the file maps none and nothing uses it; left out"
        source.assume(("init_kl_coef",), 0, why, "add a Reference component and algorithm.kl.coefficient for a penalty")
    section = compact(
        {
            "advantage": {"estimator": estimator},
            "policyLoss": _policy_loss(source),
            "kl": kl,
            "entropyCoefficient": source.number("entropy_loss_coef") or None,
        }
    )
    return Rule(section=section, kl_coefficient=coefficient)


def _estimator(source: Source) -> str:
    written = source.peek("adv_estimator")
    estimator = source.choice(_ESTIMATORS, "adv_estimator")
    if estimator is None:
        estimator = source.assume(("adv_estimator",), "GAE", "ROLL's default is gae", "it needs a critic; GRPO does not")
    if written == "agentic_reinforce":
        source.differs(("adv_estimator",), "becomes Reinforce: one return per response, not one per turn")
    norms = ("norm_mean_type", "norm_std_type")
    if estimator == "Reinforce":
        is_batch = all(source.peek(key) == "batch" for key in norms)
        if is_batch or source.peek("whiten_advantages") is True:
            for key in (*norms, "whiten_advantages"):
                if source.peek(key) in (True, "batch", None):
                    source.take(key)
            why = "returns normalized over the batch are RLJob's estimator ReinforcePlusPlus"
            source.differs(("adv_estimator",), why)
            estimator = "ReinforcePlusPlus"
    for key in norms:
        if source.peek(key) == "group" and estimator == "GRPO":
            source.take(key)
        elif source.has(key) and (key,) not in source.used:
            why = "ROLL forces group with grpo" if written == "grpo" else f"estimator {estimator} decides how rewards are normalized"
            source.drop((key,), why)
    whiten = ("whiten_advantages",)
    if source.peek(*whiten) is False:
        source.take(*whiten)
    elif source.has(*whiten) and whiten not in source.used:
        source.drop(whiten, f"estimator {estimator} does not whiten its advantages again")
    return estimator


def _policy_loss(source: Source) -> Section:
    variant_at = ("actor_train", "pg_variant") if source.has("actor_train", "pg_variant") else ("pg_variant",)
    variant = source.choice(_VARIANTS, *variant_at) or "PPO"
    if variant_at == ("actor_train", "pg_variant") and source.peek("pg_variant") == source.peek(*variant_at):
        source.take("pg_variant")
    ratio = source.peek("importance_sampling")
    if ratio in ("seq", "token") and variant == "PPO":
        source.take("importance_sampling")
        variant = "GSPO" if ratio == "seq" else variant
    low, high = _clips(source, variant)
    dual = None
    if source.flag("dual_clip_loss"):
        clip = source.number("pg_clip", above=0.0, high=100.0) or 0.2
        dual = 1 + 2 * clip
        source.differs(("dual_clip_loss",), f"becomes the bound ROLL computes, 1 + 2 * pg_clip = {dual:g}")
    mode = source.peek("loss_agg_mode")
    aggregation = source.choice(_AGGREGATIONS, "loss_agg_mode")
    if mode == "seq-mean-token-sum-norm":
        source.differs(("loss_agg_mode",), "becomes SeqMeanTokenSum, without the constant divisor", "scale training.learningRate")
    if aggregation is None:
        aggregation = source.assume(("loss_agg_mode",), "SeqMeanTokenMean", "ROLL's default")
    return compact({"variant": variant, "clipLow": low, "clipHigh": high, "dualClip": dual, "aggregation": aggregation})


def _clips(source: Source, variant: str) -> tuple[float | None, float | None]:
    if source.peek("use_pg_clip_range") is False:
        source.take("use_pg_clip_range")
    bounds = {"TIS": ("tis_lower_bound", "tis_upper_bound"), "CISPO": ("cispo_epsilon_low", "cispo_epsilon_high")}
    if variant in bounds:
        return _variant_clips(source, variant, *bounds[variant])
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
        where = ("actor_train", key) if source.has("actor_train", key) else (key,)
        value = source.number(*where, high=1.0 if key == low_key else 101.0)
        if value is None:
            value = source.assume((key,), default, f"ROLL's default with {variant}")
        else:
            source.differs(where, f"has effect here; ROLL's loader drops it and uses {default:g}", "check clipLow and clipHigh")
        values.append(value)
    low, high = values
    return (1.0 - low, max(0.0, high - 1.0)) if variant == "TIS" else (low, high)


def _kl(source: Source) -> tuple[Section | None, float]:
    loss_at = ("kl_loss_coef",)
    if source.peek("add_token_level_kl") is False:
        source.take("add_token_level_kl")
    if source.flag("use_kl_loss"):
        coefficient = source.number(*loss_at)
        if coefficient is None:
            coefficient = source.assume(loss_at, 0.0, "ROLL's default, so use_kl_loss has no effect")
        _drop_reward_kl(source, "use_kl_loss adds the KL to the loss, and RLJob has one KL term")
        return ({"coefficient": coefficient, "estimator": "K3"} if coefficient else None), coefficient
    if source.has(*loss_at):
        source.drop(loss_at, "use_kl_loss is off")
    if not source.flag("add_token_level_kl"):
        _drop_reward_kl(source, "neither use_kl_loss nor add_token_level_kl is on, so ROLL loads a reference and trains without it")
        return None, 0.0
    initial = source.number("init_kl_coef")
    if initial is None:
        initial = source.assume(("init_kl_coef",), 0.2, "ROLL's default")
    source.differs(("add_token_level_kl",), "the KL becomes a term of the loss instead of the token rewards", "check algorithm.kl")
    written = source.peek("kl_penalty")
    estimator = source.choice(_PENALTIES, "kl_penalty") or "K1"
    if written in ("abs", "full"):
        source.differs(("kl_penalty",), f"{written} has no equivalent, K1 is used", "choose algorithm.kl.estimator")
    return ({"coefficient": initial, "estimator": estimator} if initial else None), initial


def _drop_reward_kl(source: Source, why: str) -> None:
    for key in ("init_kl_coef", "kl_penalty"):
        if source.peek(key) in (0, 0.0) and key == "init_kl_coef":
            source.take(key)
        elif source.has(key):
            source.drop((key,), why)


def training(source: Source, numbers: Batch, num_devices: int) -> Section:
    """The trainer's settings.

    Args:
        source: the configuration.
        numbers: sizes of one step.
        num_devices: of the Trainer.
    """
    steps = source.integer("max_steps", low=-1)
    if steps is None or steps < 1:
        default = 500 if steps is None else 100
        why = "ROLL's default" if steps is None else "the file trains without end"
        steps = source.assume(("max_steps",), default, why, "set training.steps")
    rate = source.number(*_ARGS, "learning_rate", above=0.0)
    if rate is None:
        rate = source.assume((*_ARGS, "learning_rate"), 5e-5, "ROLL's default")
    schedule = source.choice(_SCHEDULES, *_ARGS, "lr_scheduler_type")
    if schedule is None:
        schedule = source.assume((*_ARGS, "lr_scheduler_type"), "Linear", "ROLL's default")
    warmup = source.integer(*_ARGS, "warmup_steps")
    ratio = source.number(*_ARGS, "warmup_ratio", high=1.0)
    if warmup is None or (warmup == 0 and ratio):
        warmup = common.whole_steps(source, (*_ARGS, "warmup_ratio"), ratio, steps)
    elif ratio:
        source.drop((*_ARGS, "warmup_ratio"), "warmup_steps counts")
    if warmup is not None and warmup > steps:
        source.differs((*_ARGS, "warmup_steps"), f"is cut to the {steps} steps of the job")
        warmup = steps
    tensor = source.integer(*_CONFIG, "tensor_model_parallel_size", low=1, high=64) or 1
    return compact(
        {
            "steps": steps,
            "learningRate": rate,
            "schedule": schedule,
            "warmupSteps": warmup,
            "beta1": source.number(*_ARGS, "adam_beta1", high=0.999_999),
            "beta2": source.number(*_ARGS, "adam_beta2", high=0.999_999),
            "epsilon": source.number(*_ARGS, "adam_epsilon", above=0.0),
            "weightDecay": source.number(*_ARGS, "weight_decay"),
            "maxGradNorm": source.number("max_grad_norm", above=0.0),
            "miniBatches": _mini_batches(source, numbers, num_devices, tensor),
            "epochs": source.integer("ppo_epochs", low=1),
            "microBatchTokens": _micro_batch(source, numbers),
            "activationCheckpointing": _checkpointing(source),
            "tensorParallelSize": tensor if tensor > 1 else None,
        }
    )


def _checkpointing(source: Source) -> bool | None:
    disabled = source.flag("actor_train", "model_args", "disable_gradient_checkpointing")
    granularity_at = (*_CONFIG, "recompute_granularity")
    granularity = source.choice(common.GRANULARITIES, *granularity_at)
    if granularity == "selective":
        source.differs(granularity_at, "becomes activationCheckpointing, which recomputes whole layers")
    if disabled and granularity:
        source.drop(granularity_at, "disable_gradient_checkpointing is on")
    return not disabled if disabled is not None else (True if granularity else None)


def _mini_batches(source: Source, numbers: Batch, num_devices: int, tensor: int) -> int | None:
    """Optimizer updates of one step: samples of a data-parallel process / (per-device batch * accumulation)."""
    per_device = source.integer(*_ARGS, "per_device_train_batch_size", low=1)
    accumulation = source.integer(*_ARGS, "gradient_accumulation_steps", low=1)
    if per_device is None and accumulation is None:
        return None
    per_device = per_device or 8
    accumulation = accumulation or 1
    split = tensor
    for key in ("pipeline_model_parallel_size", "context_parallel_size"):
        size = source.integer(*_CONFIG, key, low=1, high=1024) or 1
        if size > 1:
            source.drop((*_CONFIG, key), "RLJob shards with FSDP2 and tensor parallelism only; it served to find the number of updates")
        split *= size
    ulysses = source.integer("actor_train", "model_args", "ulysses_size", low=1, high=1024) or 1
    if ulysses > 1:
        source.drop(("actor_train", "model_args", "ulysses_size"), "RLJob has no sequence parallel training")
    parallel = max(1, num_devices // (split * ulysses))
    updates = max(1, numbers.prompts * numbers.samples // parallel // (per_device * accumulation))
    result = common.largest_divisor(numbers.prompts, updates)
    if result != updates:
        why = f"gives {updates} updates per step, which do not divide {numbers.prompts} prompts; {result} are made"
        source.differs((*_ARGS, "gradient_accumulation_steps"), why, "check training.miniBatches")
    return result


def _micro_batch(source: Source, numbers: Batch) -> int | None:
    where = (*_ARGS, "per_device_train_batch_size")
    per_device = source.integer(*where, low=1)
    if per_device is None:
        return None
    tokens = min(per_device * (numbers.prompt_tokens + numbers.response_tokens), 100_000_000)
    source.differs(
        where, f"{per_device} sequences of full length become at most {tokens} tokens per pass", "check training.microBatchTokens"
    )
    return tokens
