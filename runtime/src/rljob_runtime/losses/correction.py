"""Off-policy correction: how far the proximal policy has moved from the one that sampled the tokens, as a factor on the policy loss.

With ``d_t = logp_proximal - logp_behavior`` the ratio of a token is

=========  =======================================================
Token      exp(d_t)
Sequence   exp(sum of d over the sequence's trained tokens)
Geometric  exp(mean of d over the sequence's trained tokens)
Segment    exp(mean of d over a contiguous run of trained tokens)
=========  =======================================================

every exponent clamped to +-20 first. The weight is the ratio cut to its bounds, a mask is 1 inside of its bounds and 0 outside; the
factor is their product and gives no gradient. Weight and masks are apart because they answer different questions: how much a token
counts, and whether it is believed at all. With the proximal policy recomputed and a token weight this is decoupled PPO (AReaL, arXiv
2505.24298): ``sg(pi_proximal / pi_behavior)`` times the clipped loss of ``pi / pi_proximal``.

Rejected tokens stay in the denominators of :mod:`.aggregate`. Those are agreed over ranks before the first forward pass, and which
tokens are rejected is known only after it. And a mean over the rest would make the step largest when most of the data is not believed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rljob_api.vocabulary import CorrectionLevel, ProximalPolicy
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.kl import LOG_RATIO_LIMIT
from rljob_runtime.losses.spans import TokenSpans, span_means, span_sums


class Correction(NamedTuple):
    """Per-token results, each of shape (N,), without gradient."""

    factor: torch.Tensor
    """Weight times masks: what the policy loss is multiplied with."""
    weight: torch.Tensor | None
    """The cut ratio; None without a weight."""
    cut: torch.Tensor | None
    """Whether the weight is a bound instead of the ratio."""
    kept: torch.Tensor | None
    """Whether all masks let the token pass; None without masks."""


def proximal_logprobs(
    logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    proximal: ProximalPolicy,
    *,
    recomputed: torch.Tensor | None = None,
    staleness: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The old policy of the variant's ratio, and the one whose distance from the behavior policy is corrected.

    Behaviour: the ratio is against the behavior policy, the correction measures the current one. Recompute: both are the trainer's at the
    beginning of the step. Interpolate: both are ``alpha logp_behavior + (1 - alpha) sg(logp)``, A-3PO, arXiv 2512.06547, with ``alpha =
    1 / max(staleness, 1)``: the share of the way that the last update makes, as AReaL implements it (docs/algorithms/prox_approx.md), and
    as there, tokens of the trainer's own version have the behavior policy for the proximal one.

    Args:
        logprobs: shape (N,), of the policy being trained.
        behavior_logprobs: shape (N,).
        proximal: which.
        recomputed: shape (N,), needed by Recompute.
        staleness: shape (N,), versions, needed by Interpolate.

    Returns:
        Two of shape (N,), without gradient.

    Raises:
        ValueError: what the policy needs is missing.
    """
    current = logprobs.detach()
    match proximal:
        case ProximalPolicy.BEHAVIOR:
            return behavior_logprobs, current
        case ProximalPolicy.RECOMPUTE:
            if recomputed is None:
                raise ValueError(f"proximal policy {proximal} without its log-probs; run the trainer over the batch before the step")
            return recomputed, recomputed
        case ProximalPolicy.INTERPOLATE:
            if staleness is None:
                raise ValueError(f"proximal policy {proximal} without the staleness of tokens; put it into the batch")
            between = torch.lerp(current, behavior_logprobs, 1.0 / staleness.clamp(min=1.0))
            return between, between


def correct(proximal: torch.Tensor, behavior_logprobs: torch.Tensor, config: LossConfig, spans: TokenSpans) -> Correction | None:
    """Weights and masks of the tokens; None where neither is configured.

    Args:
        proximal: shape (N,), log-probs of the policy whose distance is corrected.
        behavior_logprobs: shape (N,).
        config: weight and masks.
        spans: which tokens belong together.
    """
    if config.weight is None and not config.masks:
        return None
    difference = (proximal - behavior_logprobs).detach()
    factor, weight, cut, kept = torch.ones_like(difference), None, None, None
    if config.weight is not None:
        ratio = level_ratio(difference, config.weight.level, spans)
        weight = factor = ratio.clamp(config.weight.low, config.weight.high)
        cut = weight != ratio
    for mask in config.masks:
        ratio = level_ratio(difference, mask.level, spans)
        inside = (ratio >= mask.low) & (ratio <= mask.high)
        kept = inside if kept is None else kept & inside
    return Correction(factor=factor if kept is None else factor * kept, weight=weight, cut=cut, kept=kept)


def level_ratio(difference: torch.Tensor, level: CorrectionLevel, spans: TokenSpans) -> torch.Tensor:
    """Ratio (N,) that describes each token at a level, from log-ratios (N,)."""
    match level:
        case CorrectionLevel.TOKEN:
            exponent = difference
        case CorrectionLevel.SEQUENCE:
            exponent = span_sums(difference, spans.sequences)
        case CorrectionLevel.GEOMETRIC:
            exponent = span_means(difference, spans.sequences)
        case CorrectionLevel.SEGMENT:
            exponent = span_means(difference, spans.segments)
    return exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
