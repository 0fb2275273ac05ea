"""Squared error of a critic's values per token, with an optional clip around the values of the step's beginning."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ValueTerms(NamedTuple):
    """Per-token results, each of shape (N,); only ``loss`` carries gradients."""

    loss: torch.Tensor
    clipped: torch.Tensor
    """Whether the clip decided the loss, so that the token gives no gradient."""


def clipped_value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, value_clip: float | None) -> ValueTerms:
    """Pessimistic squared error at each token.

    ``L = 0.5 max((V - R)^2, (clip(V, Vold - c, Vold + c) - R)^2)``: the value clip of PPO's reference code, described in arXiv 2005.12729
    (Implementation Matters in Deep Policy Gradients) among the optimizations that the paper of PPO leaves out. A value that moved more
    than ``c`` towards its return gives no gradient; one that moved away from it always does.

    Args:
        values: shape (N,), of the critic being trained.
        old_values: shape (N,), at the beginning of the step: those that made the advantages.
        returns: shape (N,), what the values should be.
        value_clip: c > 0, or None for ``L = 0.5 (V - R)^2``.
    """
    loss = 0.5 * (values - returns).square()
    if value_clip is None:
        return ValueTerms(loss=loss, clipped=torch.zeros_like(loss, dtype=torch.bool))
    # bounds, not old + clamp(difference): inside of them the value stays the same to the bit, and both sides share one gradient
    bounded = 0.5 * (values.clamp(old_values - value_clip, old_values + value_clip) - returns).square()
    return ValueTerms(loss=torch.maximum(loss, bounded), clipped=(bounded > loss).detach())
