"""Load balancing without a loss: each router's correction bias follows the load of its experts.

After an update ``b_e += rate * sign(mean load - load_e)``, where the load of an expert is the number of tokens of the update that chose it
in this layer (Wang et al., arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv 2412.19437, section 2.1.2). The bias is used in the choice
alone, so no gradient of the language model is disturbed, as one of :mod:`.balance` is.

Tokens count as for the loss there: positions that predict a trained token, once for each, over all micro-batches and ranks. Ranks that
divide tokens, context- and tensor-parallel ones, count their own, so that one sum over all ranks is the load. So the biases,
float32 buffers, are the same on all ranks, for any number of them. They are no parameters: the optimizer does not know them. They travel
to engines, into checkpoints and exports with the weights (:mod:`rljob_runtime.weightsync.checkpoint_names`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rljob_runtime.errors import ModelError
from rljob_runtime.training.parallel import mixture_tokens_of
from rljob_runtime.training.routers import Choices, Router, choices_of
from rljob_runtime.training.sequence_parallel import DividedTokens


class ExpertLoad:
    """How many tokens of one update chose each expert of each layer; made, and applied, by all ranks at the same time."""

    def __init__(self, choices: Choices, device: torch.device, tokens: DividedTokens | None = None) -> None:
        """Start from nothing.

        Args:
            choices: of the model.
            device: of the model.
            tokens: how tensor-parallel ranks divide the tokens that routers see; None where each sees all of its batch.
        """
        self._choices, self._tokens = choices, tokens
        self._counts = torch.zeros(len(choices.routers), choices.routers[0].num_experts, dtype=torch.float32, device=device)

    def add(self, positions: torch.Tensor) -> None:
        """Count the pass before.

        Args:
            positions: shape (N,), which of its rows (rows * width of the micro-batch) count; a row counts as often as it is named.
        """
        if self._tokens is not None:
            positions = self._tokens.own_positions(positions)
        for counts, experts in zip(self._counts, self._choices.experts(), strict=True):
            chosen = experts.index_select(0, positions).reshape(-1)
            counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))

    def apply(self, rate: float, groups: Sequence[dist.ProcessGroup]) -> dict[str, float]:
        """Move the biases against the load of all ranks.

        Args:
            rate: how far each bias moves.
            groups: sums over which, one after the other, are sums over all ranks with different tokens.

        Returns:
            Metrics: over the layers the mean of the busiest expert's load divided by the mean load (1 + MaxVio of arXiv 2408.15664), and
            the largest absolute bias after the update.
        """
        for group in groups:
            if group.size() > 1:
                dist.all_reduce(self._counts, group=group)
        mean = self._counts.mean(dim=1, keepdim=True)
        largest = self._counts.new_zeros(())
        with torch.no_grad():
            for router, steps in zip(self._choices.routers, torch.sign(mean - self._counts), strict=True):
                bias = router.bias
                assert bias is not None
                bias.add_(steps, alpha=rate)
                largest = torch.maximum(largest, bias.abs().max())
        busiest = (self._counts.amax(dim=1) / mean.squeeze(1)).mean()
        return {"train/layer_expert_load_max": float(busiest), "train/router_bias_max": float(largest)}


def check_router_bias(model: PreTrainedModel, routers: tuple[Router, ...], rate: float) -> None:
    """Refuse a rate for a model without correction biases.

    Raises:
        ModelError: some router has none, or there are no routers.
    """
    if rate > 0 and (not routers or any(router.bias is None for router in routers)):
        raise ModelError(
            f"router_bias_update_rate is {rate}, but the routers of model type {model.config.model_type} have no correction bias; "
            "remove training.routerBiasUpdateRate, or set training.loadBalancing"
        )


def load_of(model: PreTrainedModel, rate: float) -> ExpertLoad | None:
    """What counts the load of an update; None where biases stay."""
    choices = choices_of(model)
    return ExpertLoad(choices, model.device, mixture_tokens_of(model)) if rate > 0 and choices is not None else None
