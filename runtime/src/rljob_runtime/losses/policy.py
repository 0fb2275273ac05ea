"""Building blocks of policy losses: the pessimistic clipped surrogate, and the log-prob weighted by a detached ratio."""

from __future__ import annotations

import torch

from rljob_runtime.losses.kl import LOG_RATIO_LIMIT
from rljob_runtime.losses.tokens import PolicyTerms


def clipped_policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """Pessimistic clipped surrogate at each token.

    ``r = exp(clamp(logp - logp_old, -20, 20))``, ``L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)``: PPO, arXiv
    1707.06347, eq. 7; separate distances: DAPO, arXiv 2503.14476, eq. 10. With dual clip ``L = min(L, -c A)`` where A < 0: arXiv
    1912.09729. Where the old policy is the engine's own distribution, the ratio also corrects trainer-engine mismatch.

    Args:
        logprobs: shape (N,), of the policy being trained.
        old_logprobs: shape (N,), of the policy that the ratio compares with; by default the engine's when it sampled the tokens.
        advantages: shape (N,).
        clip_low: distance below 1.
        clip_high: distance above 1.
        dual_clip: c > 1, or None.
    """
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return pessimistic_terms(log_ratio, ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def pessimistic_terms(
    log_ratio: torch.Tensor, ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyTerms:
    """The larger of the plain and the clipped surrogate of given ratios, see :func:`clipped_policy_loss`.

    Args:
        log_ratio: shape (N,), only reported.
        ratio: shape (N,), differentiable.
        advantages: shape (N,).
        clip_low: distance below 1.
        clip_high: distance above 1.
        dual_clip: c > 1, or None.
    """
    surrogate = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(surrogate, bounded)
    clipped = bounded > surrogate
    if dual_clip is not None:
        ceiling = -advantages * dual_clip
        over = (advantages < 0) & (loss > ceiling)
        loss = torch.where(over, ceiling, loss)
        clipped = clipped | over
    return PolicyTerms(loss=loss, log_ratio=log_ratio.detach(), ratio=ratio.detach(), clipped=clipped)


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
