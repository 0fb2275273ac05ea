"""RLinf configurations: the learning rule, sampling, the trainer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.errors import counted
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.rlinf.rates import FSDP, Clock, backend, rates
from rljob_convert.source import Source

_ESTIMATORS = {
    "grpo": "GRPO",
    "grpo_dynamic": "GRPO",
    "math_grpo": "GRPO",
    "gae": "GAE",
    "math_gae": "GAE",
    "rloo": "RLOO",
    "reinforce": "Reinforce",
    "raw": "Reinforce",
    "reinpp": "ReinforcePlusPlus",
    "reinforce_plus_plus": "ReinforcePlusPlus",
    "reinpp_baseline": "ReinforcePlusPlus",
}
_DISCOUNTING = ("GAE", "Reinforce")
"""RLinf's reinpp sums up rewards without a discount (``compute_reinpp_advantages``)."""
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
_SYMMETRIC = ("K2", "Abs")
"""Estimators for which it does not matter which argument comes first."""
_DEFAULT_DECAY = 0.01
"""RLinf's weight decay where a file gives none, with either trainer."""
DEFAULT_STEPS = 100
MAX_TOP_K = 100_000
"""A larger topK is RLinf's way to say none: no vocabulary is so large that it would cut more than the rarest tokens."""


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
    if clip is not None and None not in (low, high) and {low, high} != {clip}:
        source.drop((*where, "ratio_clip_eps"), "clip_ratio_low and clip_ratio_high count")
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
                    "dualClip": _dual_clip(source),
                    "aggregation": _aggregation(source),
                }
            ),
            "kl": kl,
            "entropyCoefficient": _entropy(source),
        }
    )
    if estimator == "GAE" and not has_critic:
        source.differs((*where, "adv_type"), "needs a critic, and the file places none", "add a component with role: Critic")
    return Rule(section=compact(section), kl_coefficient=kl.get("coefficient", 0.0))


def _dual_clip(source: Source) -> float | None:
    """RLinf's ``clip_ratio_c``; RLJob's default is 3.

    Null switches it off; where a file has no such key, RLinf's FSDP trainer takes 3 (``fsdp_actor_worker.py``), and Megatron none.
    """
    where = ("algorithm", "clip_ratio_c")
    bound = source.number(*where, above=1.0, high=1000.0)
    has_one = source.peek("algorithm", "loss_type") in (None, *(word for word, loss in _LOSSES.items() if loss in ("PPO", "GSPO")))
    if bound is not None or not has_one or not source.keys("algorithm"):
        return bound
    if backend(source) == FSDP and "clip_ratio_c" not in source.keys("algorithm"):
        return source.assume(where, 3.0, "default of RLinf's FSDP trainer", "write dualClip: 0 to switch it off")
    return 0.0


def _note_loss_scales(source: Source) -> None:
    """What RLinf multiplies the losses of turns with (``rlinf/algorithms/loss_scales.py``), which RLJob's aggregation decides."""
    where = ("algorithm", "loss_scales")
    names = source.texts(*where)
    if "agent_level" not in names:
        if names:
            source.drop(
                where, "RLinf divides by actor.global_batch_size, RLJob by the sequences that there are", "check training.learningRate"
            )
        return
    weighs = "its tokens alike" if "turn_level" in names else "its turns alike, whatever their length"
    why = f"every agent of an episode weighs alike, and of an agent {weighs}; algorithm.policyLoss.aggregation decides in RLJob"
    same = "the same" if "turn_level" in names else "episodes weigh alike, and their tokens instead of their turns"
    source.drop(where, why, f"write SeqMeanTokenMean: {same} where an episode is one conversation of one agent")


def _aggregation(source: Source) -> str | None:
    """RLinf averages tokens within a micro-batch and then micro-batches, unless Megatron scales by ``use_valid_token_scale``."""
    _note_loss_scales(source)
    where, scale = ("algorithm", "loss_agg_func"), ("algorithm", "use_valid_token_scale")
    aggregation = source.choice(_AGGREGATIONS, *where)
    if backend(source) == FSDP and source.peek(*scale):
        source.drop(scale, "RLinf's FSDP trainer does not read it")
    elif source.flag(*scale) or aggregation != "TokenMean":
        return aggregation
    size, is_dynamic = source.peek("algorithm", "training_batch_size_per_gpu"), source.peek("runner", "enable_dynamic_batch_size")
    if aggregation == "TokenMean" and not is_dynamic and size in (None, 1):
        why = "becomes SeqMeanTokenMean: RLinf averages tokens within a micro-batch, which is one response here"
        source.differs(where, why, "write TokenMean for the mean over all tokens of an update")
        return "SeqMeanTokenMean"
    if aggregation == "TokenMean":
        source.differs(where, "is the mean over all tokens of an update, where RLinf averages within micro-batches, and then those")
    return aggregation


def _entropy(source: Source) -> float | None:
    """RLinf's bonus, where ``calculate_entropy`` is on; its workers of LLMs do not start without that key."""
    where, switch = ("algorithm", "entropy_bonus"), ("algorithm", "calculate_entropy")
    bonus = source.number(*where) or None
    source.flag(*switch)
    if bonus is None:
        return None
    if switch[1] not in source.keys("algorithm"):
        source.assume(switch, True, "RLinf does not start without it, and the file has a bonus", "check algorithm.entropyCoefficient")
    elif not source.peek(*switch):
        source.drop(where, "calculate_entropy is off, so RLinf adds none", "set algorithm.entropyCoefficient")
        return None
    return bonus


def _advantage(source: Source, estimator: str) -> Section:
    where = ("algorithm",)
    discounts = estimator in _DISCOUNTING and source.peek(*where, "adv_type") != "raw"  # there every token gets the whole score
    gamma = source.number(*where, "gamma", high=1.0) if discounts or source.peek(*where, "gamma") in (1, 1.0) else None
    whiten = source.flag(*where, "normalize_advantages")
    if whiten and estimator == "ReinforcePlusPlus":
        source.drop((*where, "normalize_advantages"), f"estimator {estimator} normalizes them itself")
    return compact(
        {
            "estimator": estimator,
            "gamma": None if gamma == 1 else gamma,
            "lambda": _lambda(source) if estimator == "GAE" else None,
            "whiten": whiten if estimator == "GAE" else True if whiten and estimator != "ReinforcePlusPlus" else None,
        }
    )


def _lambda(source: Source) -> float:
    value = source.number("algorithm", "gae_lambda", high=1.0)
    return source.assume(("algorithm", "gae_lambda"), 1.0, "RLinf's default") if value is None else value


def _kl(source: Source, estimator: str) -> Section:
    """One penalty: in the loss, or in the rewards of REINFORCE++."""
    where = ("algorithm",)
    in_loss = source.number(*where, "kl_beta") or 0.0
    in_rewards = (source.number(*where, "reinpp_kl_beta") or 0.0) if estimator == "ReinforcePlusPlus" else 0.0
    estimate = source.choice(_PENALTIES, *where, "kl_penalty_type")
    if in_loss and in_rewards:
        source.drop((*where, "reinpp_kl_beta"), "kl_beta adds the KL to the loss, and RLJob has one KL term")
    if in_loss and backend(source) == FSDP and estimate not in _SYMMETRIC:
        why = "estimates the KL from the policy to the reference; in RLinf's FSDP trainer the estimator's two arguments are swapped"
        source.differs((*where, "kl_penalty_type"), why, "check algorithm.kl")
    if in_loss:
        return compact({"coefficient": in_loss, "estimator": estimate})
    return compact({"coefficient": in_rewards, "estimator": estimate, "placement": "Reward"}) if in_rewards else {}


def with_critic(source: Source, rule: Section, trained: Section) -> Section:
    """The rule with the critic's own optimizer where values are estimated: its section, and ``actor.optim.value_lr`` without one."""
    if rule["advantage"]["estimator"] != "GAE":
        return rule
    optim = ("critic", "optim")
    own, shared = source.number(*optim, "lr", above=0.0), ("actor", "optim", "value_lr")
    if own is not None and source.has(*shared):
        source.drop(shared, f"critic.optim.lr {own:g} counts")
    rate = source.number(*shared, above=0.0) if own is None else own
    clip = source.number("algorithm", "value_cliprange", above=0.0)
    if clip is not None and source.has("algorithm", "value_clip"):
        source.drop(("algorithm", "value_clip"), f"value_cliprange {clip:g} counts, which the critic of LLMs reads")
    clip = source.number("algorithm", "value_clip", above=0.0) if clip is None else clip
    clock = Clock(steps=trained["steps"], updates=_own_updates(source))
    fields = {
        **_optimizer(source, "critic", rate, clock, "learningRateWarmupSteps"),
        "valueClip": clip,
        "warmupSteps": source.integer("algorithm", "critic_warmup_steps") or None,
    }
    return compact({**rule, "critic": compact(fields)})


def _optimizer(source: Source, role: str, rate: float | None, clock: Clock, warmup: str) -> Section:
    """AdamW's settings of a role, whose peak learning rate is ``rate``; ``warmup`` is the field with the steps of warm-up."""
    optim = (role, "optim")
    return {
        "learningRate": rate,
        **rates(source, role, rate, clock, warmup),
        "beta1": source.number(*optim, "adam_beta1", high=0.999_999),
        "beta2": source.number(*optim, "adam_beta2", high=0.999_999),
        "epsilon": source.number(*optim, "adam_eps", above=0.0),
        "weightDecay": _weight_decay(source, role),
        "maxGradNorm": source.number(*optim, "clip_grad", above=0.0),
    }


def _weight_decay(source: Source, role: str) -> float | None:
    """RLinf's default is written out where a file describes an optimizer without it."""
    decay = source.number(role, "optim", "weight_decay")
    if decay is None and source.keys(role, "optim"):
        return source.assume((role, "optim", "weight_decay"), _DEFAULT_DECAY, "RLinf's default")
    return decay


def off_policy(source: Source, variant: str | None, updates: int) -> Section | None:
    """What the ratio compares with, and the correction towards the engines.

    RLinf's ratio is against ``recomputed_logprobs`` of the actor where they are computed, else against those of the engines;
    ``importance_sampling_fix`` multiplies the advantages with min(exp(recomputed - engine), importance_sampling_clip)
    (``megatron_actor_worker.py``).

    Args:
        source: the configuration.
        variant: of the policy loss.
        updates: of one step.
    """
    fix, clip = ("algorithm", "importance_sampling_fix"), ("algorithm", "importance_sampling_clip")
    ask = ("algorithm", "recompute_logprobs")
    recomputes = source.flag(*ask)
    if source.flag(*fix):
        high = source.number(*clip, above=0.0, high=1e6)
        if high is None:
            high = source.assume(clip, 1.0, "importance_sampling_fix needs a bound, and the file has none", "set offPolicy.weight.high")
        if recomputes is False:
            source.differs(ask, "they are computed all the same: importance_sampling_fix needs them, as in RLinf")
        return {"proximal": "Recompute", "weight": {"level": "Token", "high": high}}
    if source.has(*clip):
        source.drop(clip, "importance_sampling_fix is off")
    if not recomputes or variant == "Vanilla":
        return None
    if updates > 1:
        return {"proximal": "Recompute"}
    why = "with one update per step RLinf's ratio is 1, it never clips; RLJob's is against the log-probs of the engine that sampled"
    source.differs(ask, why, "write algorithm.policyLoss.variant: Vanilla for RLinf's gradient, which corrects nothing")
    return None


def rollout(source: Source, *, trains: bool = True) -> Section:
    """Batch sizes and sampling; without training, what a validation has of them."""
    params = ("algorithm", "sampling_params")
    samples = source.integer("algorithm", "group_size", low=1, high=4096)
    if samples is None:
        samples = source.assume(("algorithm", "group_size"), 8, "the file does not say", "set rollout.samplesPerPrompt")
    temperature = source.number(*params, "temperature", high=2.0)
    if not trains and source.flag(*params, "do_sample") is False:
        temperature = 0.0  # RLinf's engines are greedy then
    if temperature == 0 and trains:
        source.differs((*params, "temperature"), "greedy sampling cannot be trained on, 1.0 is used", "choose rollout.temperature")
        temperature = 1.0
    top_k = source.integer(*params, "top_k", low=-1)
    if top_k is not None and top_k > MAX_TOP_K:
        source.drop((*params, "top_k"), "cuts nothing: no vocabulary is so large")
        top_k = None
    prompt = source.integer("data", "max_prompt_length", low=1, high=10_000_000)
    response = source.integer(*params, "max_new_tokens", low=1, high=10_000_000)
    if response is None and prompt is not None:
        total = source.integer("runner", "seq_length", low=2, high=10_000_000)
        response = total - prompt if total is not None and total > prompt else None
    return compact(
        {
            "promptsPerStep": source.integer("data", "rollout_batch_size", low=1) if trains else None,
            "samplesPerPrompt": samples,
            "groupFilter": _group_filter(source, samples) if trains else None,
            "maxPromptTokens": prompt,
            "maxResponseTokens": response,
            "temperature": temperature,
            "topP": source.number(*params, "top_p", above=0.0, high=1.0),
            "topK": top_k if top_k is not None and 0 < top_k < MAX_TOP_K else None,
            "stopTokenIds": _stop_tokens(source),
            "stopStrings": _stop_texts(source) if trains else None,
        }
    )


def _group_filter(source: Source, samples: int) -> Section | None:
    """What of RLinf's choice among the responses of a prompt (``rlinf/utils/down_sampling.py``) concerns whole groups."""
    chosen = ("algorithm", "down_sampling", "down_sampling_config")
    if not source.flag("algorithm", "down_sampling", "do_down_sampling"):
        if source.has(*chosen):
            source.drop(chosen, "do_down_sampling is off")
        return None
    kept, rejects = source.integer(*chosen, "down_sample_to_n", low=-1), source.flag(*chosen, "reject_equal_reward")
    if kept is not None and 0 < kept < samples:
        why = (
            f"RLJob trains all {samples} responses of a prompt; RLinf the {kept} whose tools failed least and whose answers have their tags"
        )
        remedy = f"write rollout.samplesPerPrompt: {kept} to train as many, and have the reward score such responses lower"
        source.drop((*chosen, "down_sample_to_n"), why, remedy)
    if not rejects:
        return None
    if samples < 2:
        source.drop((*chosen, "reject_equal_reward"), "a single response is no group")
        return None
    why = "becomes rollout.groupFilter.minStd: 0; RLJob samples another prompt in place of such a group, RLinf trains with fewer"
    source.differs((*chosen, "reject_equal_reward"), why)
    return {"minStd": 0.0}


def _stop_texts(source: Source) -> list[str]:
    where = ("algorithm", "sampling_params", "stop")
    texts = list(dict.fromkeys(source.texts(*where)))
    if texts and not any(source.keys(section) for section in ("rollout_server", "agentlightning")):
        why = "counts here; in RLinf only served requests (rollout_server, agentlightning) end with it"
        source.differs(where, why, "check rollout.stopStrings")
    return texts


def _stop_tokens(source: Source) -> list[int]:
    where = ("algorithm", "sampling_params", "stop_token_ids")
    count = min(source.length(*where), 64)
    if not count:
        source.take(*where)
    ids = [source.integer(*where, index, high=10_000_000) for index in range(count)]
    return [token for token in ids if token is not None]


def training(source: Source, generation: Section, processes: int) -> Section:
    """The trainer's settings; ``generation`` is the section rollout, ``processes`` the trainer's, 0 if not known."""
    steps, updates = _steps(source), _mini_batches(source, generation)
    rate = source.number("actor", "optim", "lr", above=0.0)
    tensor = source.integer("actor", "model", "tensor_model_parallel_size", low=1, high=64) or 1
    context = source.integer("actor", "model", "context_parallel_size", low=1, high=64) or 1
    divided = tensor if tensor > 1 else None
    return compact(
        {
            "steps": steps,
            **_optimizer(source, "actor", rate, Clock(steps=steps, updates=_own_updates(source)), "warmupSteps"),
            "miniBatches": updates,
            "microBatchTokens": _micro_batch(source, context),
            "activationCheckpointing": _checkpointing(source),
            "tensorParallelSize": divided,
            "sequenceParallel": common.sequence_parallel(source, ("actor", "model", "sequence_parallel"), divided),
            "contextParallelSize": context if context > 1 else None,
            "expertParallelSize": common.expert_parallel(source, ("actor", "model", "expert_model_parallel_size"), processes),
            "loadBalancing": common.load_balancing(source, ("actor", "model", "moe_aux_loss_coeff")),
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


def whole_batches(source: Source, generation: Section, trained: Section, processes: int) -> Section:
    """The section rollout with as many prompts as the Trainer's processes divide among them.

    RLinf rounds each process's share down and leaves out the samples that are left (``fsdp_actor_worker.py``).

    Args:
        source: the configuration.
        generation: the section rollout.
        trained: the section training.
        processes: data-parallel ones of the Trainer.
    """
    prompts, samples, updates = generation.get("promptsPerStep"), generation["samplesPerPrompt"], trained.get("miniBatches", 1)
    if prompts is None or prompts * samples // updates < processes:
        return generation
    fitting = (count for count in range(prompts, 0, -1) if count % updates == 0 and (count // updates * samples) % processes == 0)
    result = next(fitting, prompts)
    if result != prompts:
        share = f"{prompts} * {samples} samples in {updates} updates"
        why = f"becomes {result}: {processes} processes do not divide {share}; RLinf leaves out the rest"
        source.differs(("data", "rollout_batch_size"), why, "check rollout.promptsPerStep")
    return {**generation, "promptsPerStep": result}


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


def _own_updates(source: Source) -> int:
    """Optimizer updates of one step in RLinf, whatever number of them RLJob makes."""
    number = source.peek("algorithm", "n_minibatches")
    is_whole = isinstance(number, int) or (isinstance(number, float) and number.is_integer())
    return max(1, int(number)) if is_whole else 1  # type: ignore[call-overload]


def _micro_batch(source: Source, context: int) -> int | None:
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
        source.drop(size_at, "without seq_length it is not a number of tokens", "set training.microBatchTokens")
        return None
    tokens = min(-(-size * length // context), 100_000_000)
    shared = "" if context == 1 else f" on each of {context} devices"
    text = f"{counted(size, 'sequence')} of full length {'becomes' if size == 1 else 'become'} at most {tokens} tokens per pass{shared}"
    source.differs(size_at, text, "check training.microBatchTokens")
    return tokens


def _checkpointing(source: Source) -> bool | None:
    flag = source.flag("actor", "fsdp_config", "gradient_checkpointing")
    where = ("actor", "model", "recompute_granularity")
    granularity = source.choice(common.GRANULARITIES, *where)
    if granularity == "selective":
        source.differs(where, "becomes activationCheckpointing, which recomputes whole layers")
    return flag if flag is not None else (True if granularity else None)
