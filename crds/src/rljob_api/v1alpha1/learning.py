"""Algorithm, rollout, training: how the policy learns."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import Count, Fraction, NonNegative, Positive, Seconds, SpecModel
from rljob_api.vocabulary import Aggregation, KLEstimator, Schedule


class AdvantageEstimator(StrEnum):
    """How rewards become advantages."""

    GRPO = "GRPO"
    """Reward minus the mean of its group, divided by the group's standard deviation."""
    RLOO = "RLOO"
    """Reward minus the mean of the others of its group."""
    GAE = "GAE"
    """Generalized advantage estimation with a critic."""
    REINFORCE = "Reinforce"
    """The discounted return itself."""
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    """The return, normalized over the whole batch."""
    GIGPO = "GiGPO"
    """GRPO over episodes plus groups of steps that start from the same state."""
    STEP_REINFORCE = "StepReinforce"
    """The return from each step of an episode on."""


class PolicyLossVariant(StrEnum):
    """The policy-gradient loss."""

    PPO = "PPO"
    """Clipped ratio of the new to the behaviour policy."""
    VANILLA = "Vanilla"
    """Log-prob times advantage, without a ratio."""
    TIS = "TIS"
    """Log-prob weighted by the truncated ratio."""
    TOPR = "TOPR"
    """Good responses unweighted, bad ones by the truncated ratio."""
    CISPO = "CISPO"
    """Log-prob weighted by the clipped ratio, which carries no gradient."""
    KIMI15 = "Kimi15"
    """Squared-error form with a penalty towards the behaviour policy."""
    GSPO = "GSPO"
    """Clipped ratio of whole sequences."""


class Advantage(SpecModel):
    """From rewards to advantages."""

    estimator: AdvantageEstimator = AdvantageEstimator.GRPO
    """Which estimator."""
    normalize_std: bool = True
    """GRPO: divide by the group's standard deviation; off gives the Dr. GRPO variant."""


class PolicyLoss(SpecModel):
    """From advantages to the loss."""

    variant: PolicyLossVariant = PolicyLossVariant.PPO
    """Which loss."""
    clip_low: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    """The ratio is clipped at 1 - clipLow from below."""
    clip_high: Annotated[float, Field(ge=0.0, le=100.0)] = 0.2
    """The ratio is clipped at 1 + clipHigh from above."""
    dual_clip: Annotated[float, Field(gt=1.0, le=1000.0)] | None = None
    """Upper bound of the ratio for negative advantages; not set switches it off."""
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    """How token losses become one number."""


class KL(SpecModel):
    """Penalty for leaving the reference policy; needs a Reference component when the coefficient is above 0."""

    coefficient: NonNegative = 0.0
    """Weight of the penalty in the loss; 0 switches it and the reference off."""
    estimator: KLEstimator = KLEstimator.K3
    """How it is estimated."""


class Algorithm(SpecModel):
    """The learning rule."""

    advantage: Advantage = Advantage()
    """From rewards to advantages."""
    policy_loss: PolicyLoss = PolicyLoss()
    """From advantages to the loss."""
    kl: KL = KL()
    """Distance to the reference policy."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of an entropy bonus."""


class Rollout(SpecModel):
    """How responses are drawn."""

    prompts_per_step: Count = 32
    """Prompts (groups) of one training step."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 8
    """Responses drawn per prompt: the group size."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Longer prompts are left out and counted."""
    max_response_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Responses are cut here."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 switches it off."""
    top_k: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Draw from the k most likely tokens; 0 switches it off."""
    min_p: Fraction = 0.0
    """Leave out tokens below this share of the most likely one; 0 switches it off."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=10_000_000)], ...] = Field(default=(), max_length=64)
    """Tokens that end a response besides the model's end-of-sequence token."""
    stall_timeout_seconds: Seconds = 1800
    """The run fails when no response finishes for this long although some are running."""


class Training(SpecModel):
    """How the policy is updated."""

    steps: Count = 100
    """Training steps; each consumes promptsPerStep groups and publishes one version of the weights."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Schedule = Schedule.CONSTANT
    """Learning rate over the steps."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps over which the learning rate rises from 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's first decay."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """AdamW's second decay."""
    epsilon: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    mini_batches: Count = 1
    """Optimizer updates per epoch of a step; must divide promptsPerStep."""
    epochs: Count = 1
    """How often a step's samples are used."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 16_384
    """At most this many tokens, padding included, in one forward and backward pass on one device."""
    logprob_chunk_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Tokens whose vocabulary logits exist at one time."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer of the trainer."""
    step_timeout_seconds: Seconds = 3600
    """Deadline of one training step on the trainer's side; a step that misses it fails the run."""
