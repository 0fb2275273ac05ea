"""Router replay: the trainer's forward passes take the experts that the engine chose (arXiv 2510.11370, "R3").

Where two experts are nearly as likely, a rounding decides which one a token goes to, and another one in one layer changes the log-probs
behind it by more than any rounding. With the engine's choice the trainer computes the function that sampled the response: weights of the
chosen experts come from the trainer's own logits as the model defines it (:mod:`.routers`), and gradients flow into these. A choice itself
has no gradient, replayed or not.

The experts of a layer are replaced behind its router, by a hook. Layers are identified by their number and not by the order of calls, since
activation checkpointing calls routers once more in the backward pass; the routes of a pass therefore stay until the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rljob_runtime.errors import ModelError
from rljob_runtime.routes import NO_ROUTE, RouteArray
from rljob_runtime.training.routers import Router, find_routers


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
        self._routes: torch.Tensor | None = None
        routers = find_routers(layers)
        self.num_experts = routers[0].num_experts if routers else 0
        for router in routers:
            router.module.register_forward_hook(self._hook(router))
        if not routers:
            raise ModelError(f"router replay is on, but model type {config.model_type} has no routers; remove training.routerReplay")

    def set(self, routes: torch.Tensor | None) -> None:
        """What the next pass takes.

        Args:
            routes: shape (rows * width, L, K), of the tokens that routers of this rank see; negative where a router chooses. None: routers
                choose everywhere.
        """
        self._routes = routes

    def _hook(self, router: Router) -> Any:
        def replace(_: Any, __: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Any:
            if self._routes is None:
                return None
            logits, weights, own = output
            given = self._routes[:, router.layer].long()
            experts = torch.where(given < 0, own, given)
            return logits, router.weights(logits, experts).to(weights.dtype), experts

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
