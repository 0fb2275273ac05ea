"""Sums up what one training step reports, over tokens, micro-batches, updates and ranks, with two collectives at the end.

========================================  ===========================================================================
train/policy_loss, kl_loss                aggregated loss terms, mean over the step's updates
train/total_loss                          what was differentiated, mean over the step's updates; without load balancing
train/ratio_mean, _std, _max, _min        the variant's ratio of policy to old policy, over trained tokens of all updates
train/clip_fraction, _low_, _high_        share of trained tokens where a clip acted; low: on a ratio below 1
train/entropy_from_behavior               nats per token: minus the mean behavior log-prob, an entropy estimate
distillation/loss                         the term before its coefficient, mean over updates; with a teacher in the loss
train/tokens                              prompt and response tokens of all updates, all ranks
train/entropy                             nats per token, of the whole distribution; with an entropy bonus
train/correction_weight_mean              of the weights, before masks; with a correction weight
train/correction_weight_clipped_fraction  share of trained tokens whose weight is a bound
train/correction_masked_fraction          share of trained tokens that a mask left out; with masks
train/effective_sample_size               (sum f)^2 / (n sum f^2), f = weight times masks; with either; 0 if all are left out
train/load_balancing_loss                 the term before its coefficient, mean over updates; of a mixture, see training.balance
train/expert_load_max                     tokens of the busiest expert over the mean, over all layers; mean over updates
train/layer_expert_load_max               the same within each layer, mean over layers and updates; with a router bias update rate
train/router_bias_max                     largest absolute correction bias of a router, mean over updates
mismatch/kl_k1, mismatch/kl_k3            KL(behavior || trainer) per token before the first update: mean of -d and of
                                          exp(d) - d - 1, d = logp_trainer - logp_behavior
mismatch/max_abs_logprob_diff             largest absolute d before the first update
mismatch/effective_sample_size            (sum w)^2 / (n sum w^2), w = exp(d), before the first update: 1 is on-policy
========================================  ===========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from rljob_runtime.losses.correction import Correction
from rljob_runtime.losses.kl import LOG_RATIO_LIMIT
from rljob_runtime.losses.objective import Objective

_SUMS = (
    *("policy", "kl", "total", "trained", "behavior"),
    *("ratio", "offset", "offset_squared", "clipped", "clipped_low"),
    *("entropies", "entropy"),
    *("distilled", "distillation"),
    *("corrected", "factor", "factor_squared", "weighted", "correction", "cut", "masked", "rejected"),
    *("fresh", "k1", "k3", "weight", "weight_squared"),
)
_MAXIMA = ("ratio", "minus_ratio", "abs_diff")


class StepMeter:
    """Accumulates on the device, without a synchronization per micro-batch."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Start from nothing.

        Args:
            device: of what is counted.
            group: the ranks that have different batches; None: all.
        """
        self._group = group
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._num_tokens = 0
        self._balance: dict[str, float] = {}
        self._maxima = torch.full((len(_MAXIMA),), -torch.inf, dtype=torch.float64, device=device)

    def add_tokens(self, num_tokens: int) -> None:
        """Count prompt and response tokens of this rank's batches."""
        self._num_tokens += num_tokens

    def add_balance(self, metrics: Mapping[str, float]) -> None:
        """Count one update's load balancing; numbers are of all ranks already."""
        for name, value in metrics.items():
            self._balance[name] = self._balance.get(name, 0.0) + value

    def add(self, result: Objective, behavior_logprobs: torch.Tensor, *, fresh: bool) -> None:
        """Count one micro-batch.

        Args:
            result: its share of the loss, with per-token results of shape (N,), N > 0.
            behavior_logprobs: shape (N,).
            fresh: whether weights are still those of the step's beginning, so that differences are mismatch and not training.
        """
        terms, ratio, difference = result.terms, result.terms.ratio, result.behavior_log_ratio
        count = torch.full((), float(ratio.numel()), device=ratio.device)
        offset = ratio - 1.0  # moments around 1, where ratios lie: the variance keeps its digits
        values = {
            **{"policy": result.policy_loss.detach(), "kl": result.kl_loss.detach(), "total": result.loss.detach()},
            **{"trained": count, "behavior": behavior_logprobs.sum()},
            **{"ratio": ratio.sum(), "offset": offset.sum(), "offset_squared": offset.square().sum()},
            **{"clipped": terms.clipped.sum(), "clipped_low": (terms.clipped & (ratio < 1.0)).sum()},
        }
        maxima = [ratio.max(), -ratio.min()]
        if result.entropy is not None:
            values |= {"entropies": count, "entropy": result.entropy.sum()}
        if result.distillation_loss is not None:
            values |= {"distilled": count, "distillation": result.distillation_loss.detach()}
        if result.correction is not None:
            values |= _correction_sums(result.correction, count)
        if fresh:
            clamped = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            weight = clamped.exp()
            k3 = torch.expm1(clamped) - difference
            values |= {"fresh": count, "k1": -difference.sum(), "k3": k3.sum()}
            values |= {"weight": weight.sum(), "weight_squared": weight.square().sum()}
            maxima.append(difference.abs().max())
        zero = torch.zeros((), dtype=torch.float64, device=ratio.device)
        self._sums += torch.stack([values[name].to(torch.float64) if name in values else zero for name in _SUMS])
        part = self._maxima[: len(maxima)]
        torch.maximum(part, torch.stack(maxima).to(torch.float64), out=part)

    def reduce(self, num_updates: int) -> dict[str, float]:
        """Combine over ranks; all ranks must call it, all get the same numbers."""
        sums = torch.cat([self._sums, self._sums.new_tensor([self._num_tokens])])
        if dist.get_world_size(self._group) > 1:
            dist.all_reduce(sums, group=self._group)
            dist.all_reduce(self._maxima, dist.ReduceOp.MAX, group=self._group)
        total = dict(zip((*_SUMS, "tokens"), sums.tolist(), strict=True))
        top = dict(zip(_MAXIMA, self._maxima.tolist(), strict=True))
        trained, fresh = total["trained"], total["fresh"]
        variance = total["offset_squared"] / trained - (total["offset"] / trained) ** 2
        return {
            "train/policy_loss": total["policy"] / num_updates,
            "train/kl_loss": total["kl"] / num_updates,
            "train/total_loss": total["total"] / num_updates,
            "train/ratio_mean": total["ratio"] / trained,
            "train/ratio_std": math.sqrt(max(variance, 0.0)),
            "train/ratio_max": top["ratio"],
            "train/ratio_min": -top["minus_ratio"],
            "train/clip_fraction": total["clipped"] / trained,
            "train/clip_low_fraction": total["clipped_low"] / trained,
            "train/clip_high_fraction": (total["clipped"] - total["clipped_low"]) / trained,
            "train/entropy_from_behavior": -total["behavior"] / trained,
            "train/tokens": total["tokens"],
            "mismatch/kl_k1": total["k1"] / fresh,
            "mismatch/kl_k3": total["k3"] / fresh,
            "mismatch/max_abs_logprob_diff": top["abs_diff"],
            "mismatch/effective_sample_size": total["weight"] ** 2 / (fresh * total["weight_squared"]),
            **_optional(total, num_updates),
            **{name: value / num_updates for name, value in self._balance.items()},
        }


def _correction_sums(correction: Correction, count: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums of one micro-batch's correction; ``count`` is its number of tokens."""
    factor = correction.factor
    values = {"corrected": count, "factor": factor.sum(), "factor_squared": factor.square().sum()}
    if correction.weight is not None and correction.cut is not None:
        values |= {"weighted": count, "correction": correction.weight.sum(), "cut": correction.cut.sum()}
    if correction.kept is not None:
        values |= {"masked": count, "rejected": (~correction.kept).sum()}
    return values


def _optional(total: Mapping[str, float], num_updates: int) -> dict[str, float]:
    """Metrics of options that are on: those of which some rank has counted tokens."""
    metrics = {}
    if total["entropies"]:
        metrics["train/entropy"] = total["entropy"] / total["entropies"]
    if total["distilled"]:
        metrics["distillation/loss"] = total["distillation"] / num_updates
    if total["weighted"]:
        metrics["train/correction_weight_mean"] = total["correction"] / total["weighted"]
        metrics["train/correction_weight_clipped_fraction"] = total["cut"] / total["weighted"]
    if total["masked"]:
        metrics["train/correction_masked_fraction"] = total["rejected"] / total["masked"]
    if total["corrected"]:
        squares = total["corrected"] * total["factor_squared"]
        metrics["train/effective_sample_size"] = total["factor"] ** 2 / squares if squares else 0.0
    return metrics
