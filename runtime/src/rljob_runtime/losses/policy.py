"""Clipped policy-gradient loss per token (PPO) with separate clip distances and optional dual clip."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rljob_runtime.losses.kl import LOG_RATIO_LIMIT


class PolicyTerms(NamedTuple):
    """Per-token results, each of shape (N,); only ``loss`` carries gradients."""

    loss: torch.Tensor
    log_ratio: torch.Tensor
    """``logp - logp_behaviour``, not clamped."""
    ratio: torch.Tensor
    """``exp`` of the clamped log-ratio."""
    clipped: torch.Tensor
    """Whether a clip decided the loss, so that the token gives no policy gradient."""


def clipped_policy_loss(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyTerms:
    """Pessimistic clipped surrogate at each token.

    ``r = exp(clamp(logp - logp_behaviour, -20, 20))``, ``L = max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A)``: PPO, arXiv
    1707.06347, eq. 7; separate distances: DAPO, arXiv 2503.14476, eq. 10. With dual clip ``L = min(L, -c A)`` where A < 0: arXiv
    1912.09729, eq. 5. The behaviour is the engine's own distribution, so the ratio also corrects trainer-engine mismatch.

    Args:
        logprobs: shape (N,), of the policy being trained.
        behaviour_logprobs: shape (N,), of the engine when it drew the tokens.
        advantages: shape (N,).
        clip_low: distance below 1.
        clip_high: distance above 1.
        dual_clip: c > 1, or None.
    """
    log_ratio = logprobs - behaviour_logprobs
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
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
