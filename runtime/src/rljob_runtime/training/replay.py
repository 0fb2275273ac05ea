"""Router replay: the trainer's forward passes take the experts that the engine chose (arXiv 2510.11370, "R3").

Where two experts are nearly as likely, a rounding decides which one a token goes to, and another one in one layer changes the log-probs
behind it by more than any rounding. With the engine's choice the trainer computes the function that sampled the response: weights of the
chosen experts are a softmax over the trainer's own logits as the model defines it, and gradients flow into these. A choice itself has no
gradient, replayed or not.

The experts of a layer are replaced behind its router, by a hook. Layers are identified by their number and not by the order of calls, since
activation checkpointing calls routers once more in the backward pass; the routes of a pass therefore stay until the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rljob_runtime.errors import ModelError
from rljob_runtime.routes import NO_ROUTE, RouteArray

ROUTER_SUFFIX = "TopKRouter"
"""How transformers ends the names of the routers that return (logits, weights, experts)."""


class Replay:
    """The routers of a model, and what they are to choose in the present pass."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        """Put a hook behind every router; without routes it changes nothing.

        Args:
            model: not yet sharded, which changes names of classes.
            layers: its decoder layers, in order.

        Raises:
            ModelError: it has no routers.
        """
        config = model.config.get_text_config()
        self.num_layers = len(layers)
        self.top_k = int(getattr(config, "num_experts_per_tok", 0))
        self.num_experts = 0
        self._router_layers: list[int] = []
        self._routes: torch.Tensor | None = None
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if type(module).__name__.endswith(ROUTER_SUFFIX):
                    self._router_layers.append(number)
                    self.num_experts = int(cast(Any, module).num_experts)
                    module.register_forward_hook(self._hook(number))
        if not self._router_layers:
            raise ModelError(f"router replay is on, but model type {config.model_type} has no routers; remove training.routerReplay")

    def set(self, routes: torch.Tensor | None) -> None:
        """What the next pass takes.

        Args:
            routes: shape (rows * width, L, K), of the tokens that routers of this rank see; negative where a router chooses. None: routers
                choose everywhere.
        """
        self._routes = routes

    def by_router(self, routes: torch.Tensor | None) -> list[torch.Tensor] | None:
        """Of routes (rows * width, L, K) those of each router's layer, shape (rows * width, K); None where routers choose everywhere."""
        return None if routes is None else [routes[:, layer].long() for layer in self._router_layers]

    def _hook(self, layer: int) -> Any:
        def replace(router: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
            if self._routes is None:
                return None
            logits, weights, own = output
            given = self._routes[:, layer].long()
            experts = torch.where(given < 0, own, given)
            chosen = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, experts)
            if getattr(router, "norm_topk_prob", True):  # Mixtral's always do, and have no such setting
                chosen = chosen / chosen.sum(dim=-1, keepdim=True)
            return logits, chosen.to(weights.dtype), experts

        return replace


def replay_of(model: nn.Module) -> Replay | None:
    """What :func:`~rljob_runtime.training.model.load_model` made; None where nothing is replayed."""
    found: Replay | None = getattr(model, "replay", None)
    return found


def check_routes(model: nn.Module, routes: RouteArray | None) -> None:
    """Refuse routes that are not of this model: on CUDA an expert that it lacks would end the process without a name.

    Raises:
        ValueError: saying what does not fit.
    """
    if routes is None:
        return
    replay = replay_of(model)
    if replay is None:
        raise ValueError("the batch has routes, but the policy does not replay them; set replays_routes in its PolicyConfig")
    wanted = (replay.num_layers, replay.top_k)
    if routes.ndim != 3 or routes.shape[1:] != wanted:
        raise ValueError(f"routes have shape {routes.shape}; the model has {wanted[0]} layers and {wanted[1]} experts per token")
    if routes.size and not NO_ROUTE <= int(np.min(routes)) <= int(np.max(routes)) < replay.num_experts:
        raise ValueError(
            f"routes span [{routes.min()}, {routes.max()}] but layers have {replay.num_experts} experts; engine and trainer differ"
        )
