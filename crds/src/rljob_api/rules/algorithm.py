"""Rules about the learning rule: settings that contradict each other, and settings that nothing reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.rules.distillation import distills, distills_alone
from rljob_api.rules.rollout import max_staleness
from rljob_api.v1alpha1.algorithm import KL, Advantage, CorrectionMask
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.policy_loss import CustomLoss, LossInput, PolicyLossVariant, readers
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import AdvantageEstimator, CorrectionLevel, KLPlacement, NormScope, ProximalPolicy

_CLIPPED = (PolicyLossVariant.PPO, PolicyLossVariant.GSPO)
"""Without a gradient where their ratio is clipped; that of TIS and CISPO is a weight, and 1 leaves the plain policy gradient."""
_GROUP_ESTIMATORS = (AdvantageEstimator.GRPO, AdvantageEstimator.RLOO)
"""They subtract the mean of a group, and give every token of a response the same advantage."""


def _listed(words: Iterable[str]) -> str:
    """For example ``A, B or C``."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _group_size(spec: RLJobSpec) -> Iterator[FieldError]:
    estimator, samples, reward = spec.algorithm.advantage.estimator, spec.rollout.samples_per_prompt, spec.algorithm.reward
    if samples >= 2 or distills_alone(spec):
        return
    if estimator in (*_GROUP_ESTIMATORS, AdvantageEstimator.GIGPO):
        problem = f"{estimator} compares the responses to one prompt and needs at least 2"
        yield _error("spec.rollout.samplesPerPrompt", samples, problem, "write 2 or more")
    for field, scope in (("center", reward.center), ("scale", reward.scale)):
        if scope is NormScope.GROUP and estimator is not AdvantageEstimator.STEP_REINFORCE:  # which compares the turns of a group
            problem = f"compares the responses to one prompt, but rollout.samplesPerPrompt is {samples}"
            yield _error(f"spec.algorithm.reward.{field}", scope, problem, "write 2 or more samples, or scope Batch or Running")


def _advantage(spec: RLJobSpec) -> Iterator[FieldError]:
    """Settings of one estimator under another."""
    advantage, path = spec.algorithm.advantage, "spec.algorithm.advantage"
    estimator = advantage.estimator
    if estimator not in (AdvantageEstimator.GRPO, AdvantageEstimator.GIGPO) and not advantage.normalize_std:
        problem = f"has no effect with estimator {estimator}"
        yield _error(f"{path}.normalizeStd", False, problem, "remove it, or use estimator GRPO")
    for field in ("episode_weight", "turn_weight", "episode_count") if estimator is not AdvantageEstimator.GIGPO else ():
        value = getattr(advantage, field)
        if value != getattr(Advantage(), field):
            alias = Advantage.model_fields[field].alias
            yield _error(f"{path}.{alias}", value, f"has no effect with estimator {estimator}", "remove it, or use estimator GiGPO")
    if estimator in _GROUP_ESTIMATORS and advantage.gamma != 1:
        problem = f"has no effect with estimator {estimator}, which gives every token of a response the same advantage"
        yield _error(f"{path}.gamma", advantage.gamma, problem, "remove it, or use estimator GAE, Reinforce or ReinforcePlusPlus")
    if estimator is not AdvantageEstimator.GAE and advantage.lambda_ != Advantage().lambda_:
        yield _error(f"{path}.lambda", advantage.lambda_, f"has no effect with estimator {estimator}", "remove it, or use estimator GAE")
    if estimator is AdvantageEstimator.CUSTOM:
        if advantage.gamma != 1:
            problem = "has no effect with estimator Custom, whose function gets only its parameters"
            yield _error(f"{path}.gamma", advantage.gamma, problem, "give it in algorithm.advantage.parameters")
        if advantage.function is None:
            remedy = "write module:function, for example my_advantages:estimate"
            yield _error(f"{path}.function", None, "is missing, and estimator is Custom", remedy)
    for field in ("function", "parameters") if estimator is not AdvantageEstimator.CUSTOM else ():
        if value := getattr(advantage, field):
            yield _error(f"{path}.{field}", value, f"has no effect with estimator {estimator}", "remove it, or use estimator Custom")
    if estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS and advantage.whiten:
        problem = f"has no effect with estimator {estimator}, which normalizes over all tokens of a step already"
        yield _error(f"{path}.whiten", True, problem, "remove it, or use estimator Reinforce")


def _gigpo(spec: RLJobSpec) -> Iterator[FieldError]:
    advantage = spec.algorithm.advantage
    if advantage.estimator is AdvantageEstimator.GIGPO and not advantage.episode_weight and not advantage.turn_weight:
        problem = "is 0 and so is turnWeight: every advantage is 0, and nothing is learned"
        yield _error("spec.algorithm.advantage.episodeWeight", 0, problem, "give one of them a value above 0")


def _updates(spec: RLJobSpec) -> int:
    """Number of optimizer updates of one step."""
    return spec.training.mini_batches * spec.training.epochs


def _critic(spec: RLJobSpec) -> Iterator[FieldError]:
    """GAE and the critic come together."""
    estimator, critics = spec.algorithm.advantage.estimator, spec.with_role(Role.CRITIC)
    clip = spec.algorithm.critic.value_clip
    if estimator is AdvantageEstimator.GAE:
        if clip is not None and _updates(spec) == 1:
            problem = "has no effect: with training.miniBatches 1 and training.epochs 1 no value has moved before the only update of a step"
            yield _error("spec.algorithm.critic.valueClip", clip, problem, "remove it, or make several updates per step")
        if not critics:
            remedy = "add a component with role: Critic, or use an estimator without one, such as GRPO"
            yield _error("spec.algorithm.advantage.estimator", estimator, "needs a Critic component that estimates values", remedy)
        return
    for index, component in critics:
        problem = f"{component.name} would do nothing, algorithm.advantage.estimator is {estimator}"
        yield _error(f"spec.components[{index}].role", "Critic", problem, "write estimator: GAE, or remove the component")
    for field, value in spec.algorithm.critic.changed().items():
        problem = f"has no effect with estimator {estimator}, which needs no critic"
        yield _error(f"spec.algorithm.critic.{field}", value, problem, "remove it, or use estimator GAE")


def _penalizes_rewards(spec: RLJobSpec) -> bool:
    """Whether a KL is taken from rewards, after they are normalized."""
    return spec.algorithm.kl.coefficient > 0 and spec.algorithm.kl.placement is KLPlacement.REWARD


def _reward(spec: RLJobSpec) -> Iterator[FieldError]:
    """What the estimator undoes, and a penalty that begins before the response does."""
    advantage, reward, path = spec.algorithm.advantage, spec.algorithm.reward, "spec.algorithm.reward"
    estimator = advantage.estimator
    penalized = _penalizes_rewards(spec)
    for field, scope in (("center", reward.center), ("scale", reward.scale)) if estimator is AdvantageEstimator.GIGPO else ():
        if scope is not None:
            problem = f"has no effect with estimator {estimator}, which normalizes scores and returns of turns within groups itself"
            yield _error(f"{path}.{field}", scope, problem, "remove it, or use estimator StepReinforce")
    if reward.center is not None and estimator in _GROUP_ESTIMATORS and reward.clip is None:
        problem = f"has no effect with estimator {estimator}, which subtracts a mean of the group from what is left"
        yield _error(f"{path}.center", reward.center, problem, "remove it, or use estimator Reinforce")
    repeated = estimator is AdvantageEstimator.GRPO and advantage.normalize_std and reward.clip is None and not penalized
    if reward.scale is not None and repeated:
        problem = "has no effect with estimator GRPO, which divides by the group's standard deviation itself"
        yield _error(f"{path}.scale", reward.scale, problem, "remove it, or write algorithm.advantage.normalizeStd: false")
    if estimator is AdvantageEstimator.REINFORCE_PLUS_PLUS and advantage.gamma == 1 and reward.clip is None and not penalized:
        for field, scope in (("center", reward.center), ("scale", reward.scale)):
            if scope is NormScope.BATCH:
                problem = f"has no effect with estimator {estimator}, which normalizes over all tokens of a step itself"
                yield _error(f"{path}.{field}", scope, problem, "remove it, or use estimator Reinforce")
    limit = spec.rollout.max_response_tokens
    if reward.overlong is not None and reward.overlong.buffer_tokens > limit:
        problem = f"is more than rollout.maxResponseTokens ({limit}), so that even an empty response is punished"
        yield _error(f"{path}.overlong.bufferTokens", reward.overlong.buffer_tokens, problem, f"use at most {limit}")


def _policy_loss(spec: RLJobSpec) -> Iterator[FieldError]:
    """Settings of one loss under another."""
    loss, path = spec.algorithm.policy_loss, "spec.algorithm.policyLoss"
    for field, value in loss.foreign().items():
        remedy = f"remove it, or use variant {_listed(readers(field))}"
        yield _error(f"{path}.{field}", value, f"has no effect with variant {loss.variant}", remedy)
    if loss.dual_clip is not None and 0 < loss.dual_clip <= 1:
        problem = "would clip responses that the policy has not changed: their ratio is 1"
        yield _error(f"{path}.dualClip", loss.dual_clip, problem, "use more than 1, or 0 to switch it off")
    if loss.variant in _CLIPPED and not loss.clip_low and not loss.clip_high:
        problem = "is 0 and so is clipHigh: the ratio is clipped to 1, whatever the policy became"
        yield _error(f"{path}.clipLow", 0, problem, "write one above 0, or remove both for the defaults of the variant")
    if loss.variant is PolicyLossVariant.TOPR and not loss.positive_weight and not loss.negative_weight:
        problem = "is 0 and so is negativeWeight: no response counts, and nothing is learned"
        yield _error(f"{path}.positiveWeight", 0, problem, "give one of them a value above 0")
    if loss.variant is PolicyLossVariant.CUSTOM and loss.function is None:
        yield _error(f"{path}.function", None, "is missing, and variant is Custom", "write module:function, for example my_losses:loss")


def _proximal(spec: RLJobSpec) -> Iterator[FieldError]:
    """Another policy to compare with must differ from those that are compared anyway."""
    off_policy, loss = spec.algorithm.off_policy, spec.algorithm.policy_loss.settings
    variant = spec.algorithm.policy_loss.variant
    proximal, path = off_policy.proximal, "spec.algorithm.offPolicy.proximal"
    if proximal is ProximalPolicy.BEHAVIOR:
        return
    corrects = off_policy.weight is not None or bool(off_policy.masks)
    # a KL in rewards, the one that a target adapts to, and that to a teacher are measured with the proximal policy
    measures = spec.algorithm.kl.coefficient > 0 and (_penalizes_rewards(spec) or spec.algorithm.kl.target is not None)
    measures = measures or distills(spec)
    if proximal is ProximalPolicy.INTERPOLATE and max_staleness(spec) <= 1:
        problem = (
            f"has no effect: tokens are at most {max_staleness(spec)} versions old (overlap.maxStaleness, asyncGenerationRatio), "
            "and the policy of tokens one version old is their own"
        )
        yield _error(path, proximal, problem, "remove it, or write overlap.asyncGenerationRatio: 2")
    elif LossInput.OLD_LOGPROBS not in loss.needs and not (corrects or measures):
        problem = f"has no effect with variant {variant}, which has no ratio, and without weight and masks"
        yield _error(path, proximal, problem, "remove it, or give offPolicy.weight or offPolicy.masks")
    elif proximal is ProximalPolicy.RECOMPUTE and _updates(spec) == 1 and not (corrects or measures or isinstance(loss, CustomLoss)):
        problem = (
            f"leaves {variant} without a ratio: with training.miniBatches 1 and training.epochs 1 there is one update per step, "
            "whose policy is the recomputed one"
        )
        yield _error(path, proximal, problem, "remove it, give offPolicy.weight or offPolicy.masks, or make several updates per step")


def _correction(spec: RLJobSpec) -> Iterator[FieldError]:
    off_policy, variant, path = spec.algorithm.off_policy, spec.algorithm.policy_loss.variant, "spec.algorithm.offPolicy"
    weight = off_policy.weight
    if weight is not None:
        if off_policy.proximal is ProximalPolicy.BEHAVIOR and spec.algorithm.policy_loss.settings.weighs_by_ratio:
            problem = f"would count the ratio to the behavior policy twice: variant {variant} has it already with proximal Behaviour"
            yield _error(f"{path}.weight.level", weight.level, problem, "remove it, or write proximal: Recompute or Interpolate")
        if weight.low > weight.high:
            yield _error(f"{path}.weight.low", weight.low, f"is above high, {weight.high:g}", f"use at most {weight.high:g}")
    first: dict[CorrectionLevel, int] = {}
    for index, mask in enumerate(off_policy.masks):
        yield from _mask_bounds(mask, f"{path}.masks[{index}]")
        if mask.level in first:
            problem = f"is the level of masks[{first[mask.level]}] already, {_bounds(off_policy.masks[first[mask.level]])}"
            yield _error(f"{path}.masks[{index}].level", mask.level, problem, "write one mask with the narrower bounds")
        first.setdefault(mask.level, index)


def _mask_bounds(mask: CorrectionMask, path: str) -> Iterator[FieldError]:
    """Bounds must have room between them, and 1 in it: the ratio of a token whose policy has not changed."""
    unchanged = "leaves out every token whose policy has not changed: its ratio is 1"
    if mask.low > mask.high:
        problem = f"is above high, {mask.high:g}, so that no token is trained"
        yield _error(f"{path}.low", mask.low, problem, f"use at most {mask.high:g}")
    elif mask.low == mask.high:
        problem = "is as large as high, so that a token is trained only where its ratio is exactly that"
        yield _error(f"{path}.low", mask.low, problem, "use less than 1, and high above 1")
    elif mask.low > 1:
        yield _error(f"{path}.low", mask.low, unchanged, "use at most 1")
    elif mask.high < 1:
        yield _error(f"{path}.high", mask.high, unchanged, "use at least 1")


def _bounds(mask: CorrectionMask) -> str:
    return f"{mask.low:g} to {mask.high:g}"


def reads_reference(spec: RLJobSpec) -> bool:
    """Whether the rule compares with the reference policy."""
    return spec.algorithm.kl.coefficient > 0 or LossInput.REFERENCE_LOGPROBS in spec.algorithm.policy_loss.settings.needs


def base_is_reference(spec: RLJobSpec) -> bool:
    """Whether the trainer answers for the reference: with adapters it still has the weights that the policy began with."""
    return spec.model.lora is not None and reads_reference(spec) and not spec.with_role(Role.REFERENCE)


def _kl(spec: RLJobSpec) -> Iterator[FieldError]:
    references, kl, path = spec.with_role(Role.REFERENCE), spec.algorithm.kl, "spec.algorithm.kl"
    loss = spec.algorithm.policy_loss
    lacks = not references and not base_is_reference(spec)
    if lacks and kl.coefficient > 0:
        remedy = "add a component with role: Reference, or train adapters (model.lora), or write 0"
        yield _error(f"{path}.coefficient", kl.coefficient, "needs a Reference component to compare with", remedy)
    needed = LossInput.REFERENCE_LOGPROBS in loss.settings.needs
    if lacks and needed:
        remedy = "add a component with role: Reference, or train adapters (model.lora)"
        yield _error("spec.algorithm.policyLoss.variant", loss.variant, "needs a Reference component to compare with", remedy)
    if kl.coefficient == 0:
        for index, component in references if not (needed or isinstance(loss.settings, CustomLoss)) else ():
            problem = f"{component.name} would do nothing, algorithm.kl.coefficient is 0"
            yield _error(f"spec.components[{index}].role", "Reference", problem, "set the coefficient, or remove the component")
        for field, value in kl.changed().items():
            yield _error(f"{path}.{field}", value, "has no effect, algorithm.kl.coefficient is 0", "remove it, or set the coefficient")
    elif kl.target is None and kl.horizon != KL().horizon:
        problem = "has no effect without target, the coefficient stays as it is"
        yield _error(f"{path}.horizon", kl.horizon, problem, "remove it, or give algorithm.kl.target")


def _filters(spec: RLJobSpec) -> Iterator[FieldError]:
    filters, path = spec.algorithm.filters, "spec.algorithm.filters"
    low, high = filters.min_group_mean, filters.max_group_mean
    if low is not None and high is not None and low >= high:
        problem = f"is not below maxGroupMean, {high:g}, so that no group is trained"
        yield _error(f"{path}.minGroupMean", low, problem, "write a smaller one, or a larger maxGroupMean")
    sampled = spec.rollout.group_filter
    if sampled is not None and low is not None and sampled.min_mean is not None and sampled.min_mean >= low:
        problem = f"has no effect, rollout.groupFilter.minMean ({sampled.min_mean:g}) leaves those groups out already"
        yield _error(f"{path}.minGroupMean", low, problem, "remove one of them")
    if sampled is not None and high is not None and sampled.max_mean is not None and sampled.max_mean <= high:
        problem = f"has no effect, rollout.groupFilter.maxMean ({sampled.max_mean:g}) leaves those groups out already"
        yield _error(f"{path}.maxGroupMean", high, problem, "remove one of them")
    limit = spec.rollout.max_response_tokens
    if filters.max_failed_tokens is not None and filters.max_failed_tokens > limit:
        problem = f"has no effect, no response is longer than rollout.maxResponseTokens ({limit})"
        yield _error(f"{path}.maxFailedTokens", filters.max_failed_tokens, problem, f"use at most {limit}, or remove it")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _group_size,
    _advantage,
    _gigpo,
    _critic,
    _reward,
    _policy_loss,
    _proximal,
    _correction,
    _kl,
    _filters,
)
"""Rules between fields, each independent of the others."""
