"""The routers of a mixture of experts: where they are, what they chose, and how they weight what they choose.

Two kinds, by transformers' own modules:

* softmax over the logits (Qwen-MoE, Mixtral, DeepSeek-V2);
* sigmoid of each logit, with a correction bias that is used in the choice of experts and not in their weights (DeepSeek-V3, arXiv
  2412.19437, equations 12 to 16; GLM-4-MoE). The bias is a buffer: no gradient reaches it (:mod:`.router_bias`).

Weights of chosen experts are their scores, normalized over the chosen ones where the model does that, times a constant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from rljob_runtime.weightsync.checkpoint_names import ROUTER_BIAS

ROUTER_SUFFIX = "topkrouter"
"""How transformers ends the names of the routers that return (logits, weights, experts), in lower case."""
TINY = 1e-20
"""Added to the sum of sigmoid scores, as transformers does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """A router, and the number of its decoder layer."""

    layer: int
    module: nn.Module

    @property
    def num_experts(self) -> int:
        """Of the layer."""
        return int(cast(Any, self.module).num_experts)

    @property
    def bias(self) -> torch.Tensor | None:
        """The correction bias, shape (E,); None for a router without one. Ask again after an offload, which replaces storages."""
        return self.module._buffers.get(ROUTER_BIAS)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores of all experts, shape (T, E), float32, without the bias."""
        if self.bias is not None:
            return torch.sigmoid(logits.float())
        return torch.softmax(logits, dim=-1, dtype=torch.float32)

    def shares(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores that sum to 1, shape (T, E): of the load-balancing loss (equation 19 of arXiv 2412.19437 for sigmoids)."""
        scores = self.scores(logits)
        return scores if self.bias is None else scores / (scores.sum(dim=-1, keepdim=True) + TINY)

    def weights(self, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Weights of these experts, shape (T, K), float32, as the router computes them for those that it chooses itself.

        Args:
            logits: shape (T, E).
            experts: shape (T, K).
        """
        chosen = self.scores(logits).gather(1, experts)
        scale = getattr(self.module, "routed_scaling_factor", None)
        # Mixtral always normalizes and has no such setting; DeepSeek-V2 never does, and has a scaling factor instead
        if getattr(self.module, "norm_topk_prob", scale is None):
            chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + (0.0 if self.bias is None else TINY))
        return chosen if scale is None else chosen * scale


def find_routers(layers: Sequence[nn.Module]) -> tuple[Router, ...]:
    """Those of a model's decoder layers, in order; before sharding, which changes names of classes."""
    return tuple(
        Router(layer=number, module=module)
        for number, layer in enumerate(layers)
        for module in layer.modules()
        if type(module).__name__.lower().endswith(ROUTER_SUFFIX)
    )


class Choices:
    """What the routers of a model chose in the pass before, replayed choices included.

    Recomputed layers (activation checkpointing) call their routers again in the backward pass, with the same result.
    """

    def __init__(self, routers: Sequence[Router]) -> None:
        """Put a hook behind every router; one that replaces choices has to be there already."""
        self.routers = tuple(routers)
        self._experts: dict[int, torch.Tensor] = {}
        for index, router in enumerate(self.routers):
            router.module.register_forward_hook(self._hook(index))

    def experts(self) -> list[torch.Tensor]:
        """Of each router, shape (rows * width, K)."""
        return [self._experts[index] for index in range(len(self.routers))]

    def _hook(self, index: int) -> Any:
        def keep(_: nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            self._experts[index] = output[2].detach()

        return keep


def choices_of(model: nn.Module) -> Choices | None:
    """What :func:`~rljob_runtime.training.model.load_model` made; None if what routers choose is not recorded."""
    found: Choices | None = getattr(model, "choices", None)
    return found


def keep_biases_float32(modules: Iterable[nn.Module]) -> None:
    """Correction biases in float32, whatever the model's dtype: they change by far less than bfloat16's resolution."""
    for module in modules:
        bias = module._buffers.get(ROUTER_BIAS)
        if bias is not None:
            module._buffers[ROUTER_BIAS] = bias.float()
