"""Policy losses per token: one function for each class of settings of :mod:`rljob_api.v1alpha1.policy_loss`.

With ``rho = exp(clamp(logp - logp_old, -20, 20))``, ``A`` the advantage, ``sg`` a stopped gradient, ``lo`` and ``hi`` the clip
distances:

=======  ==============================================================  ================================================
PPO      max(-rho A, -clip(rho, 1 - lo, 1 + hi) A)                       arXiv 1707.06347, see :mod:`.policy`
Vanilla  -A logp                                                         REINFORCE, Williams 1992
TIS      -sg(clip(rho, 1 - lo, 1 + hi)) A logp                           truncated importance sampling, Ionides 2008
TOPR     score > 0: -wp A logp; else -wn sg(clip(rho, 0, 1)) A logp      arXiv 2503.14286, ratios per token
CISPO    as TIS; with the mask 0 where PPO would clip                    MiniMax-M1, arXiv 2506.13585
Kimi15   -A logp + tau / 2 (logp - logp_old)^2                           Kimi k1.5, arXiv 2501.12599, square per token
GSPO     PPO with exp(mean over the sequence of logp - logp_old)         arXiv 2507.18071, its token form
Custom   what the user's function returns                                see :mod:`.custom`
=======  ==============================================================  ================================================

TOPR and Kimi15 are ROLL's token forms; the papers take ratio and square of the whole response. TOPR divides by the score and not by the
advantage: all negative advantages are tapered only where failures score 0 or less.

A new loss is a class of settings there, a function here and a row of :data:`LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from rljob_api.v1alpha1.policy_loss import (
    CISPOLoss,
    CustomLoss,
    GSPOLoss,
    Kimi15Loss,
    LossSettings,
    PPOLoss,
    TISLoss,
    TOPRLoss,
    VanillaLoss,
)
from rljob_runtime.losses.custom import custom_loss
from rljob_runtime.losses.kl import LOG_RATIO_LIMIT
from rljob_runtime.losses.policy import clipped_policy_loss, pessimistic_terms, weighted_policy_loss
from rljob_runtime.losses.spans import span_means
from rljob_runtime.losses.tokens import LossTokens, PolicyTerms


def policy_terms(tokens: LossTokens, settings: LossSettings) -> PolicyTerms:
    """The variant of these settings at each token; differentiable in ``tokens.logprobs``.

    Raises:
        ValueError: the tokens lack what the variant needs, or the user's function returned something else than one number per token.
    """
    return LOSSES[type(settings)](tokens, settings)


def ppo(tokens: LossTokens, settings: PPOLoss) -> PolicyTerms:
    """Clipped surrogate with the ratio of each token."""
    return clipped_policy_loss(
        tokens.logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip or None,
    )


def gspo(tokens: LossTokens, settings: GSPOLoss) -> PolicyTerms:
    """PPO's bounds on the ratio of whole sequences, ``s = exp(clamp(mean_t(logp - logp_old), -20, 20))``, at each of their tokens.

    The token form of GSPO, arXiv 2507.18071: every token has the value ``s`` and the gradient ``s`` times its own log-prob's, ``sg(s)
    exp(logp - sg(logp))``. With one advantage and one weight a sequence that is the gradient of ``s`` itself; with several, each token
    keeps its own. Tokens of a sequence are clipped together as far as their advantages have one sign.
    """
    logprobs = tokens.logprobs
    log_ratio = (logprobs - tokens.old_logprobs).detach()
    sequence_ratio = span_means(log_ratio, tokens.sequence_lengths).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    ratio = sequence_ratio * (logprobs - logprobs.detach()).exp()
    bounds = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
    return pessimistic_terms(log_ratio, ratio, tokens.advantages, **bounds, dual_clip=settings.dual_clip or None)


def vanilla(tokens: LossTokens, settings: VanillaLoss) -> PolicyTerms:
    """REINFORCE: no ratio."""
    return weighted_policy_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, None)


def tis(tokens: LossTokens, settings: TISLoss | CISPOLoss) -> PolicyTerms:
    """Log-prob weighted by the truncated ratio."""
    bounds = (1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return weighted_policy_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, bounds)


def cispo(tokens: LossTokens, settings: CISPOLoss) -> PolicyTerms:
    """As TIS; with the mask nothing where PPO would clip."""
    terms = tis(tokens, settings)
    if not settings.mask_clipped:
        return terms
    above = (tokens.advantages > 0) & (terms.ratio > 1.0 + settings.clip_high)
    below = (tokens.advantages < 0) & (terms.ratio < 1.0 - settings.clip_low)
    return terms._replace(loss=terms.loss * ~(above | below))


def topr(tokens: LossTokens, settings: TOPRLoss) -> PolicyTerms:
    """No ratio where the response's score is above 0, a tapered one elsewhere."""
    if tokens.scores is None:
        raise ValueError("policy loss TOPR needs the score of each response, and there are no scores; pass them")
    positive = tokens.scores > 0
    terms = weighted_policy_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, (0.0, 1.0))
    plain = -settings.positive_weight * tokens.advantages * tokens.logprobs
    loss = torch.where(positive, plain, settings.negative_weight * terms.loss)
    return terms._replace(loss=loss, clipped=terms.clipped & ~positive)


def kimi15(tokens: LossTokens, settings: Kimi15Loss) -> PolicyTerms:
    """REINFORCE with a squared penalty on the log-ratio."""
    terms = weighted_policy_loss(tokens.logprobs, tokens.old_logprobs, tokens.advantages, None)
    return terms._replace(loss=terms.loss + 0.5 * settings.tau * (tokens.logprobs - tokens.old_logprobs).square())


LOSSES: Mapping[type[LossSettings], Callable[[LossTokens, Any], PolicyTerms]] = MappingProxyType(
    {
        PPOLoss: ppo,
        GSPOLoss: gspo,
        VanillaLoss: vanilla,
        TISLoss: tis,
        CISPOLoss: cispo,
        TOPRLoss: topr,
        Kimi15Loss: kimi15,
        CustomLoss: custom_loss,
    }
)
"""Every variant's formula, by the type of its settings."""
