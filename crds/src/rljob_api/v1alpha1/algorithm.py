"""The learning rule: from scores to advantages, from advantages to a loss."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from rljob_api.v1alpha1.base import Count, Fraction, FreeForm, FunctionPath, NonNegative, Positive, Score, SpecModel
from rljob_api.v1alpha1.learning import Training
from rljob_api.v1alpha1.policy_loss import PolicyLoss
from rljob_api.vocabulary import (
    AdvantageEstimator,
    CorrectionLevel,
    EpisodeCount,
    KLEstimator,
    KLPlacement,
    NormScope,
    ProximalPolicy,
    Schedule,
)

LogRatioBound = Annotated[float, Field(ge=0.0, le=1e6)]
"""A bound of an importance ratio."""


class Advantage(SpecModel):
    """From rewards to advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    """Which estimator."""
    normalize_std: bool = True
    """GRPO and GiGPO: divide by the group's standard deviation; off gives the Dr. GRPO variant."""
    gamma: Fraction = 1.0
    """Discount per token, for GAE, Reinforce and ReinforcePlusPlus; per turn for GiGPO and StepReinforce."""
    episode_weight: NonNegative = 1.0
    """GiGPO: factor of the term that compares episodes."""
    turn_weight: NonNegative = 1.0
    """GiGPO: factor of the term that compares turns from the same state."""
    episode_count: EpisodeCount = EpisodeCount.ONCE
    """GiGPO: how often an episode counts in the mean and deviation of its group's scores."""
    lambda_: Annotated[float, Field(ge=0.0, le=1.0, alias="lambda")] = 0.95
    """GAE: 1 uses only rewards; smaller values rely more on the critic's values."""
    whiten: bool | None = None
    """Normalize the advantages of all trained tokens of a step to mean 0 and variance 1. By default true for GAE, otherwise false."""
    clip: Positive | None = None
    """Advantages are clipped to plus and minus this, after whitening."""
    function: FunctionPath | None = None
    """Custom: the estimator as module:function, found next to the job file or on the driver's Python path."""
    parameters: FreeForm = Field(default={})
    """Custom: keyword arguments of the function."""

    @model_validator(mode="after")
    def _whiten_by_estimator(self) -> Advantage:
        if self.whiten is None:
            self.__dict__["whiten"] = self.estimator is AdvantageEstimator.GAE  # frozen; model_fields_set stays what the user set
        return self


class Overlong(SpecModel):
    """Penalty for responses that come close to the limit (DAPO, arXiv 2503.14476: soft overlong punishment)."""

    buffer_tokens: Count
    """The penalty begins this many tokens before rollout.maxResponseTokens."""
    penalty: Positive = 1.0
    """Penalty at the limit; it grows linearly over the buffer."""


class RewardShaping(SpecModel):
    """How scores are transformed before advantages are computed; with StepReinforce, returns of turns; with GiGPO, clip limits its sum."""

    center: NormScope | None = None
    """Subtract the mean of these samples; by default scores stay unchanged, as GRPO and RLOO require, which subtract a mean themselves."""
    scale: NormScope | None = None
    """Divide by the standard deviation of these samples."""
    clip: Positive | None = None
    """Scores are clipped to plus and minus this, after normalization."""
    overlong: Overlong | None = None
    """Penalty for long responses, before normalization."""


class CorrectionWeight(SpecModel):
    """A factor on each token's loss: the truncated ratio of the proximal to the behavior policy."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    """What one ratio describes."""
    low: LogRatioBound = 0.0
    """Smaller ratios count as this."""
    high: Annotated[float, Field(gt=0.0, le=1e6)] = 2.0
    """Larger ratios count as this."""


class CorrectionMask(SpecModel):
    """Excludes tokens whose ratio of the proximal to the behavior policy is out of bounds."""

    level: CorrectionLevel = CorrectionLevel.TOKEN
    """What one ratio describes; if it is out of bounds, all of that is excluded."""
    low: LogRatioBound = 0.5
    """Smallest ratio that is trained."""
    high: LogRatioBound = 5.0
    """Largest ratio that is trained."""


class OffPolicy(SpecModel):
    """Correction for tokens from a different policy than the trained one: older weights, or an engine with different numerics."""

    proximal: ProximalPolicy = ProximalPolicy.BEHAVIOR
    """The old policy of the loss's ratio. The correction's ratio is between it and the behavior policy; with Behaviour, between the current
    policy and the behavior policy."""
    weight: CorrectionWeight | None = None
    """Factor on the loss; none when not set."""
    masks: tuple[CorrectionMask, ...] = Field(default=(), max_length=8)
    """Tokens to exclude; a token must pass all masks."""


class KL(SpecModel):
    """Penalty for leaving the reference policy.

    A coefficient above 0 needs a Reference component, or adapters (model.lora), whose base model is then the reference.
    """

    coefficient: NonNegative = 0.0
    """Weight of the penalty; 0 disables it, and no reference is needed."""
    estimator: KLEstimator = KLEstimator.K3
    """How it is estimated."""
    placement: KLPlacement = KLPlacement.LOSS
    """Where it counts."""
    target: Positive | None = None
    """Target KL per token, which the coefficient adapts to; by default the coefficient is fixed."""
    horizon: Count = 10_000
    """Samples over which the coefficient adapts."""


class Distillation(SpecModel):
    """On-policy distillation: the policy learns to match a Teacher component's model on the tokens that the policy samples.

    With rewards, both add up; without rewards, or if all have weight: 0, the policy follows only the teacher.
    """

    coefficient: Positive = 1.0
    """Weight of the KL from the policy to the teacher."""
    placement: KLPlacement = KLPlacement.REWARD
    """Reward: log p_policy - log p_teacher of each sampled token is subtracted from its advantage, so that the policy loss with its ratio
    and clip applies. Loss: half its square is a term of the loss, whose gradient is that of the KL on fresh samples."""


class SampleFilters(SpecModel):
    """Responses that are scored but not trained; they still count in the statistics of their group."""

    truncated: bool = False
    """Exclude responses that were truncated at rollout.maxResponseTokens."""
    min_group_mean: Score | None = None
    """Exclude groups whose mean score is not above this."""
    max_group_mean: Score | None = None
    """Exclude groups whose mean score is not below this."""
    max_failed_tokens: Count | None = None
    """Exclude responses that did not pass and have at least this many tokens."""


class SampleWeights(SpecModel):
    """Factors on the loss of whole responses, scaled to mean 1 over a step."""

    difficulty: bool = False
    """0.5 for prompts that every sample solves, up to 2 for prompts that none solves."""
    length: bool = False
    """1.5 for the shortest response of the step, down to 0.5 for the longest."""


class Critic(SpecModel):
    """Training of the value model of GAE. What is not set here is as training has it for the policy."""

    learning_rate: Positive = 1e-5
    """Peak learning rate of the critic's own AdamW."""
    min_learning_rate: NonNegative = 0.0
    """Final learning rate of the schedules Linear and Cosine; like learningRate, it is not taken from training."""
    schedule: Schedule | None = None
    """Learning rate schedule."""
    learning_rate_warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """Steps over which the learning rate rises from 0, as training.warmupSteps of the policy."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """AdamW's beta1, the decay of the first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """AdamW's beta2, the decay of the second moment."""
    epsilon: Positive | None = None
    """AdamW's epsilon."""
    weight_decay: NonNegative | None = None
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive | None = None
    """Gradients are clipped to this norm."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    """At most this many tokens, padding included, in one forward and backward pass on one device."""
    value_clip: Positive | None = None
    """A value that moved toward its return by more than this since the beginning of the step has no gradient; by default disabled."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Initial steps that train only the critic."""

    def over(self, training: Training) -> Training:
        """The policy's settings with the critic's own in their place: what the critic's optimizer and passes obey."""
        own = {name: getattr(self, name) for name in _LIKE_TRAINING} | {"warmup_steps": self.learning_rate_warmup_steps}
        return training.model_copy(update={name: value for name, value in own.items() if value is not None})


_LIKE_TRAINING = tuple(name for name in Critic.model_fields if name in Training.model_fields and name != "warmup_steps")
"""Fields that mean of the critic what those of training mean of the policy; warmupSteps is another thing in each."""


class Algorithm(SpecModel):
    """The learning rule."""

    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    reward: RewardShaping = RewardShaping()
    """How scores are transformed before."""
    policy_loss: PolicyLoss = PolicyLoss()
    """From advantages to the loss."""
    off_policy: OffPolicy = OffPolicy()
    """Correction for tokens from a different policy."""
    kl: KL = KL()
    """Penalty on the distance to the reference policy."""
    distillation: Distillation = Distillation()
    """Distance to the teacher, in jobs with a Teacher component."""
    filters: SampleFilters = SampleFilters()
    """Responses that are not trained."""
    sample_weights: SampleWeights = SampleWeights()
    """Weights of responses."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of an entropy bonus."""
    critic: Critic = Critic()
    """Training of the critic."""
