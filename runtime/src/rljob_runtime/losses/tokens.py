"""What a policy loss is given and what it returns; the interface of the user's own losses too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The N trained tokens of one micro-batch: whole sequences, one after another. Tensors have shape (N,) and float type.

    Only ``logprobs`` carries gradients.
    """

    logprobs: torch.Tensor
    """The policy being trained."""
    old_logprobs: torch.Tensor
    """The policy that ratios compare with, see ``algorithm.offPolicy.proximal``; by default the engine's."""
    advantages: torch.Tensor
    sequence_lengths: Sequence[int]
    """Trained tokens of each sequence, sums to N."""
    scores: torch.Tensor | None = None
    """Raw score of the token's response, where the loss needs it."""
    reference_logprobs: torch.Tensor | None = None
    """The frozen reference, where the job has one."""


class PolicyTerms(NamedTuple):
    """Per-token results, each of shape (N,); only ``loss`` carries gradients."""

    loss: torch.Tensor
    log_ratio: torch.Tensor
    """``logp - logp_old`` of the token, not clamped."""
    ratio: torch.Tensor
    """``exp`` of the clamped log-ratio; of the whole sequence in GSPO."""
    clipped: torch.Tensor
    """Whether a bound acted: in PPO and GSPO it decided the loss, so that the token gives no policy gradient; elsewhere the ratio counts as
    the bound."""
