"""The scalar that one update minimizes, from the log-probs of some of its sequences.

``policy loss + kl coefficient * KL + distillation coefficient * D - entropy coefficient * entropy``, each a weighted sum over tokens with
the global denominators of :mod:`.aggregate`: values and gradients of parts add up to those of the whole, however sequences are split.
Sample weights and the off-policy factor scale the policy loss only: they say how much a response teaches, while the other terms bind the
policy everywhere alike.

D is ``(log p - log p_teacher)^2 / 2`` at each sampled token (K2 of :mod:`.kl`): its gradient, ``(log p - log p_teacher) grad log p``, is on
fresh samples that of the reverse KL per token, so that as a term of the loss the teacher pulls as it does in the advantages (K. Lu and
Thinking Machines Lab, "On-Policy Distillation", 2025; K2 as the loss whose gradient is that of K1 in the reward: arXiv 2510.01555).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from rljob_api.vocabulary import KLEstimator
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.correction import Correction, correct, proximal_logprobs
from rljob_runtime.losses.kl import kl_terms
from rljob_runtime.losses.spans import TokenSpans
from rljob_runtime.losses.tokens import LossTokens, PolicyTerms
from rljob_runtime.losses.variants import policy_terms


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of N trained tokens needs besides their log-probs; whole sequences, one after another. All of shape (N,)."""

    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """From :func:`~rljob_runtime.losses.aggregate.token_weights`."""
    policy_weights: torch.Tensor
    """The same times sample weights: of the policy loss."""
    spans: TokenSpans
    proximal_logprobs: torch.Tensor | None = None
    staleness: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    teacher_logprobs: torch.Tensor | None = None
    scores: torch.Tensor | None = None
    """Raw score of the token's response."""


class Objective(NamedTuple):
    """The loss of some tokens and its parts; only ``loss`` is for differentiating."""

    loss: torch.Tensor
    """Scalar."""
    policy_loss: torch.Tensor
    """Scalar."""
    kl_loss: torch.Tensor
    """Scalar, before its coefficient."""
    distillation_loss: torch.Tensor | None
    """Scalar, before its coefficient; None without a teacher in the loss."""
    behavior_log_ratio: torch.Tensor
    """Shape (N,): ``logp - logp_behavior``, not clamped."""
    entropy: torch.Tensor | None
    """Shape (N,); None where it was not computed."""
    terms: PolicyTerms
    correction: Correction | None


def objective(
    logprobs: torch.Tensor, inputs: LossInputs, config: LossConfig, *, kl_coefficient: float, entropy: torch.Tensor | None = None
) -> Objective:
    """This part's share of an update's loss.

    Args:
        logprobs: shape (N,), of the policy being trained, differentiable.
        inputs: of these tokens.
        config: of the loss.
        kl_coefficient: the one of this update.
        entropy: shape (N,), of the policy at each token, differentiable; with ``config.entropy_coefficient``.

    Raises:
        ValueError: inputs lack what the config asks for.
    """
    old, corrected = proximal_logprobs(
        logprobs, inputs.behavior_logprobs, config.proximal, recomputed=inputs.proximal_logprobs, staleness=inputs.staleness
    )
    tokens = LossTokens(
        logprobs=logprobs,
        old_logprobs=old,
        advantages=inputs.advantages,
        sequence_lengths=inputs.spans.sequences,
        scores=inputs.scores,
        reference_logprobs=inputs.reference_logprobs,
    )
    terms = policy_terms(tokens, config.policy)
    correction = correct(corrected, inputs.behavior_logprobs, config, inputs.spans)
    token_loss = terms.loss if correction is None else terms.loss * correction.factor
    policy_loss = torch.dot(token_loss, inputs.policy_weights)
    kl_loss = torch.zeros_like(policy_loss)
    if inputs.reference_logprobs is not None and kl_coefficient > 0:
        kl_loss = torch.dot(kl_terms(logprobs, inputs.reference_logprobs, config.kl_estimator), inputs.weights)
    loss = policy_loss + kl_coefficient * kl_loss
    distillation_loss = None
    if config.needs_teacher and inputs.teacher_logprobs is not None:
        distillation_loss = torch.dot(kl_terms(logprobs, inputs.teacher_logprobs, KLEstimator.K2), inputs.weights)
        loss = loss + config.distillation_coefficient * distillation_loss
    if entropy is not None:
        loss = loss - config.entropy_coefficient * torch.dot(entropy, inputs.weights)
    return Objective(
        loss=loss,
        policy_loss=policy_loss,
        kl_loss=kl_loss,
        distillation_loss=distillation_loss,
        behavior_log_ratio=(logprobs - inputs.behavior_logprobs).detach(),
        entropy=None if entropy is None else entropy.detach(),
        terms=terms,
        correction=correction,
    )
