"""Load balancing of a mixture's experts: the auxiliary loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6).

``coefficient * E * sum_e f_e p_e``: of all routings of an update, over every mixture layer together, ``f_e`` is the number of tokens that
chose expert e and ``p_e`` the router's probability of it, both per token and layer. That is what transformers computes
(``load_balancing_loss_func`` of modeling_qwen3_moe, modeling_mixtral, version 5), there for one batch in one piece.

Which tokens count: the positions that predict a trained token, once for each. So the term belongs to the tokens of the loss, and does not
depend on padding, on how sequences are cut into micro-batches, on shared prompts, or on the number of ranks.

The product is not linear in the tokens: averages of micro-batches would be another loss, and one that asks each micro-batch to use all
experts (arXiv 2501.11873). But ``f`` has no gradient. Where an update has several micro-batches or ranks, a forward pass without gradient
counts it over all of them first, and what remains is linear in ``p`` and adds up. It costs about a third of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rljob_runtime.errors import ModelError
from rljob_runtime.training.config import LoadBalancingConfig
from rljob_runtime.training.microbatch import MicroBatch
from rljob_runtime.training.routers import Router

COEFFICIENT_KEY = "router_aux_loss_coef"
"""Of ``config.json``, in all types that have the loss."""


def balance_coefficient(model: PreTrainedModel, config: LoadBalancingConfig | None) -> float:
    """What the loss is multiplied by; 0 without load balancing.

    Raises:
        ModelError: the model has no routers, or names no coefficient where none is given.
    """
    if config is None:
        return 0.0
    found = getattr(model.config.get_text_config(), COEFFICIENT_KEY, None)
    if "router_logits" not in (getattr(model.base_model, "_can_record_outputs", None) or {}):
        raise ModelError(f"load balancing is on, but model type {model.config.model_type} has no routers; remove training.loadBalancing")
    coefficient = found if config.coefficient is None else config.coefficient
    if coefficient is None:
        raise ModelError(f"load balancing is on, but config.json has no {COEFFICIENT_KEY}; set training.loadBalancing.coefficient")
    return float(coefficient)


def routing_sums(
    routers: Sequence[Router], experts: Sequence[torch.Tensor], router_logits: Sequence[torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    """How often each expert was chosen, and with which probability, summed over layers and tokens.

    Args:
        routers: of each mixture layer.
        experts: what they chose in the same pass, shape (rows * width, K).
        router_logits: of each mixture layer, shape (rows * width, E).
        positions: shape (N,), which of these rows count; a row counts as often as it is named.

    Returns:
        Shape (2, E), float32: choices, without gradient, and probabilities.
    """
    times = torch.zeros(router_logits[0].shape[0], dtype=torch.float32, device=positions.device)
    times.index_add_(0, positions, torch.ones_like(positions, dtype=torch.float32))
    num_experts = router_logits[0].shape[-1]
    chosen = torch.zeros(num_experts, dtype=torch.float32, device=positions.device)
    probability = torch.zeros_like(chosen)
    for router, logits, taken in zip(routers, router_logits, experts, strict=True):
        chosen = chosen.scatter_add(0, taken.reshape(-1), times.repeat_interleave(taken.shape[1]))
        probability = probability + times @ router.shares(logits)
    return torch.stack([chosen, probability])


class Balance:
    """The loss of one update; made, and reduced, by all ranks at the same time."""

    def __init__(
        self,
        micro_batches: Sequence[MicroBatch],
        run: Callable[[MicroBatch], torch.Tensor],
        *,
        coefficient: float,
        top_k: int,
        group: dist.ProcessGroup,
    ) -> None:
        """Count the choices of the whole update, where one pass would not see all of them.

        Args:
            micro_batches: of this rank; as many on every rank.
            run: a forward pass that returns :func:`routing_sums`.
            coefficient: of the loss.
            top_k: experts of a token.
            group: the ranks with different tokens.
        """
        self._coefficient, self._top_k, self._group = coefficient, top_k, group
        self._chosen: torch.Tensor | None = None
        self._probability: torch.Tensor | None = None
        if len(micro_batches) == 1 and group.size() == 1:
            return
        with torch.no_grad():
            counted = [run(micro)[0] * float(not micro.is_filler) for micro in micro_batches]
        self._chosen = torch.stack(counted).sum(0)
        dist.all_reduce(self._chosen, group=group)

    def loss(self, sums: torch.Tensor) -> torch.Tensor:
        """The share of one micro-batch in the loss, its coefficient included; scalar, differentiable.

        Args:
            sums: of :func:`routing_sums`.
        """
        chosen = sums[0].detach() if self._chosen is None else self._chosen
        self._chosen = chosen
        done = sums[1].detach()
        self._probability = done if self._probability is None else self._probability + done
        return self._coefficient * self._scaled(chosen, sums[1])

    def metrics(self) -> dict[str, float]:
        """The whole loss before its coefficient, and the load of the busiest expert over the mean; a collective."""
        assert self._chosen is not None
        total = torch.zeros_like(self._chosen) if self._probability is None else self._probability
        dist.all_reduce(total, group=self._group)
        busiest = self._chosen.max() * self._chosen.numel() / self._chosen.sum()
        return {"train/load_balancing_loss": float(self._scaled(self._chosen, total)), "train/expert_load_max": float(busiest)}

    def _scaled(self, chosen: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
        routings = chosen.sum() / self._top_k
        return chosen.numel() * torch.dot(chosen / routings, probability / routings)
