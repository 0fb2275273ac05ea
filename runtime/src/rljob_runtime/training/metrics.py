"""Sums up what one training step reports, over tokens, micro-batches, updates and ranks, with two collectives at the end.

================================  ===========================================================================
train/policy_loss, kl_loss        aggregated loss terms, mean over the step's updates
train/total_loss                  policy_loss + kl coefficient * kl_loss
train/ratio_mean, _max, _min      policy over behaviour probability, over trained tokens of all updates
train/clip_fraction               share of trained tokens whose gradient a clip removed
train/entropy_from_behaviour      nats per token: minus the mean behaviour log-prob, an entropy estimate
train/tokens                      prompt and response tokens of all updates, all ranks
mismatch/kl_k1, mismatch/kl_k3    KL(behaviour || trainer) per token before the first update: mean of -d and of
                                  exp(d) - d - 1, d = logp_trainer - logp_behaviour
mismatch/max_abs_logprob_diff     largest absolute d before the first update
mismatch/effective_sample_size    (sum w)^2 / (n sum w^2), w = exp(d), before the first update: 1 is on-policy
================================  ===========================================================================
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from rljob_runtime.losses.kl import LOG_RATIO_LIMIT
from rljob_runtime.losses.policy import PolicyTerms

_SUMS = ("policy", "kl", "trained", "ratio", "clipped", "behaviour", "fresh", "k1", "k3", "weight", "weight_squared")
_MAXIMA = ("ratio", "minus_ratio", "abs_diff")


class StepMeter:
    """Accumulates on the device, without a synchronisation per micro-batch."""

    def __init__(self, device: torch.device) -> None:
        """Start from nothing."""
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._num_tokens = 0
        self._maxima = torch.full((len(_MAXIMA),), -torch.inf, dtype=torch.float64, device=device)

    def add_tokens(self, num_tokens: int) -> None:
        """Count prompt and response tokens of this rank's batches."""
        self._num_tokens += num_tokens

    def add(
        self, terms: PolicyTerms, behaviour_logprobs: torch.Tensor, policy_loss: torch.Tensor, kl_loss: torch.Tensor, *, fresh: bool
    ) -> None:
        """Count one micro-batch.

        Args:
            terms: per-token results, shape (N,), N > 0.
            behaviour_logprobs: shape (N,).
            policy_loss: this micro-batch's share of the aggregated policy loss, scalar.
            kl_loss: its share of the aggregated KL, before the coefficient, scalar.
            fresh: whether weights are still those of the step's beginning, so that differences are mismatch and not training.
        """
        difference, ratio = terms.log_ratio, terms.ratio
        count = torch.full((), float(difference.numel()), device=difference.device)
        values = [policy_loss.detach(), kl_loss.detach(), count, ratio.sum(), terms.clipped.sum(), behaviour_logprobs.sum()]
        maxima = [ratio.max(), -ratio.min()]
        if fresh:
            k3 = torch.expm1(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - difference
            values += [count, -difference.sum(), k3.sum(), ratio.sum(), ratio.square().sum()]
            maxima.append(difference.abs().max())
        self._sums[: len(values)] += torch.stack([v.to(torch.float64) for v in values])
        part = self._maxima[: len(maxima)]
        torch.maximum(part, torch.stack(maxima).to(torch.float64), out=part)

    def reduce(self, num_updates: int, kl_coefficient: float) -> dict[str, float]:
        """Combine over ranks; all ranks must call it, all get the same numbers."""
        sums = torch.cat([self._sums, self._sums.new_tensor([self._num_tokens])])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX)
        total = dict(zip((*_SUMS, "tokens"), sums.tolist(), strict=True))
        top = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        trained, fresh = total["trained"], total["fresh"]
        policy, kl = total["policy"] / num_updates, total["kl"] / num_updates
        return {
            "train/policy_loss": policy,
            "train/kl_loss": kl,
            "train/total_loss": policy + kl_coefficient * kl,
            "train/ratio_mean": total["ratio"] / trained,
            "train/ratio_max": top["ratio"],
            "train/ratio_min": -top["minus_ratio"],
            "train/clip_fraction": total["clipped"] / trained,
            "train/entropy_from_behaviour": -total["behaviour"] / trained,
            "train/tokens": total["tokens"],
            "mismatch/kl_k1": total["k1"] / fresh,
            "mismatch/kl_k3": total["k3"] / fresh,
            "mismatch/max_abs_logprob_diff": top["abs_diff"],
            "mismatch/effective_sample_size": total["weight"] ** 2 / (fresh * total["weight_squared"]),
        }
