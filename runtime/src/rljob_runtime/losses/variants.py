"""Policy losses per token other than PPO's, and the choice among all of them.

With ``rho = exp(clamp(logp - logp_old, -20, 20))``, ``A`` the advantage, ``sg`` what gives no gradient, ``lo`` and ``hi`` the clip
distances:

=======  ==============================================================  ================================================
PPO      max(-rho A, -clip(rho, 1 - lo, 1 + hi) A)                       arXiv 1707.06347, see :mod:`.policy`
Vanilla  -A logp                                                         REINFORCE, Williams 1992
TIS      -sg(clip(rho, 1 - lo, 1 + hi)) A logp                           truncated importance sampling, Ionides 2008
TOPR     score > 0: -wp A logp; else -wn sg(clip(rho, 0, 1)) A logp      arXiv 2503.14286, ratios per token
CISPO    as TIS; with the mask 0 where PPO would clip                    MiniMax-M1, arXiv 2506.13585
Kimi15   -A logp + tau / 2 (logp - logp_old)^2                           Kimi k1.5, arXiv 2501.12599, square per token
GSPO     PPO with exp(mean over the sequence of logp - logp_old)         arXiv 2507.18071, its token form
=======  ==============================================================  ================================================

TOPR and Kimi15 are ROLL's token forms; the papers take ratio and square of the whole response. TOPR divides by the score and not by the
advantage: all negative advantages are tapered only where failures score 0 or less.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rljob_api.vocabulary import PolicyLossVariant
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.kl import LOG_RATIO_LIMIT
from rljob_runtime.losses.policy import PolicyTerms, clipped_policy_loss, pessimistic_terms
from rljob_runtime.losses.spans import span_means


def policy_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    config: LossConfig,
    *,
    sequence_lengths: Sequence[int],
    positive: torch.Tensor | None = None,
) -> PolicyTerms:
    """The configured variant at each token; differentiable in ``logprobs``.

    Args:
        logprobs: shape (N,), of the policy being trained.
        old_logprobs: shape (N,), of the policy that ratios compare with; gives no gradient.
        advantages: shape (N,).
        config: variant and its settings.
        sequence_lengths: trained tokens of each sequence, sums to N; GSPO uses it.
        positive: shape (N,), whether the response's score is above 0; TOPR needs it.

    Raises:
        ValueError: TOPR without ``positive``.
    """
    match config.variant:
        case PolicyLossVariant.PPO:
            return clipped_policy_loss(
                logprobs, old_logprobs, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
            )
        case PolicyLossVariant.GSPO:
            return sequence_policy_loss(logprobs, old_logprobs, advantages, config, sequence_lengths)
        case PolicyLossVariant.VANILLA:
            return weighted_policy_loss(logprobs, old_logprobs, advantages, None)
        case PolicyLossVariant.KIMI15:
            terms = weighted_policy_loss(logprobs, old_logprobs, advantages, None)
            return terms._replace(loss=terms.loss + 0.5 * config.tau * (logprobs - old_logprobs).square())
        case PolicyLossVariant.TIS:
            return weighted_policy_loss(logprobs, old_logprobs, advantages, (1.0 - config.clip_low, 1.0 + config.clip_high))
        case PolicyLossVariant.CISPO:
            terms = weighted_policy_loss(logprobs, old_logprobs, advantages, (1.0 - config.clip_low, 1.0 + config.clip_high))
            if not config.mask_clipped:
                return terms
            above = (advantages > 0) & (terms.ratio > 1.0 + config.clip_high)
            below = (advantages < 0) & (terms.ratio < 1.0 - config.clip_low)
            return terms._replace(loss=terms.loss * ~(above | below))
        case PolicyLossVariant.TOPR:
            if positive is None:
                raise ValueError("policy loss TOPR asks for the sign of each response's score, and there are no scores; pass them")
            terms = weighted_policy_loss(logprobs, old_logprobs, advantages, (0.0, 1.0))
            plain = -config.positive_weight * advantages * logprobs
            loss = torch.where(positive, plain, config.negative_weight * terms.loss)
            return terms._replace(loss=loss, clipped=terms.clipped & ~positive)


def weighted_policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, bounds: tuple[float, float] | None
) -> PolicyTerms:
    """``-sg(clip(rho, *bounds)) A logp`` at each token, without bounds ``-A logp``: unlike in PPO, no bound ends a token's gradient.

    Args:
        logprobs: shape (N,), of the policy being trained.
        old_logprobs: shape (N,).
        advantages: shape (N,).
        bounds: of the ratio; None leaves it out of the loss, so that it is only reported.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if bounds is None:
        return PolicyTerms(loss=-advantages * logprobs, log_ratio=log_ratio, ratio=ratio, clipped=torch.zeros_like(ratio, dtype=torch.bool))
    weight = ratio.clamp(*bounds)
    return PolicyTerms(loss=-weight * advantages * logprobs, log_ratio=log_ratio, ratio=ratio, clipped=weight != ratio)


def sequence_policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, config: LossConfig, sequence_lengths: Sequence[int]
) -> PolicyTerms:
    """PPO's bounds on the ratio of whole sequences, ``s = exp(clamp(mean_t(logp - logp_old), -20, 20))``, at each of their tokens.

    The token form of GSPO, arXiv 2507.18071: every token has the value ``s`` and the gradient ``s`` times its own log-prob's, ``sg(s)
    exp(logp - sg(logp))``. With one advantage and one weight a sequence that is the gradient of ``s`` itself; with several, each token
    keeps its own. Tokens of a sequence are clipped together as far as their advantages have one sign.

    Args:
        logprobs: shape (N,), of the policy being trained.
        old_logprobs: shape (N,).
        advantages: shape (N,).
        config: of the clips.
        sequence_lengths: trained tokens of each sequence, sums to N.
    """
    log_ratio = (logprobs - old_logprobs).detach()
    sequence_ratio = span_means(log_ratio, sequence_lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ratio = sequence_ratio * (logprobs - logprobs.detach()).exp()
    return pessimistic_terms(log_ratio, ratio, advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)
