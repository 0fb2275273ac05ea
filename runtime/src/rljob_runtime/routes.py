"""Which experts each layer of a mixture chose for each token: the engine's choices, on their way to the trainer that replays them.

Numbers of experts, shape (tokens, layers, experts per token); layers count all decoder layers, and mean nothing at dense ones. The engine
computes no token after the last one that it samples, so the last token of a response has no route; nor is one needed, since it predicts
nothing that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RouteArray = npt.NDArray[np.signedinteger]
"""int8 for up to 128 experts, else int16."""

NO_ROUTE = -1
"""At every layer and place of a token that has no route: the trainer's own router chooses."""


def route_dtype(num_experts: int) -> type[np.signedinteger]:
    """What holds the numbers of so many experts, and :data:`NO_ROUTE`."""
    return np.int8 if num_experts - 1 <= np.iinfo(np.int8).max else np.int16


def joined(parts: Sequence[RouteArray]) -> RouteArray | None:
    """Routes of stretches of tokens one after another; None where there are none."""
    return np.concatenate(parts) if parts else None


def place(target: RouteArray, end: int, routes: RouteArray) -> None:
    """Write the routes of a segment whose tokens end before ``end`` of a sequence.

    Args:
        target: shape (T, L, K), of the whole sequence.
        end: of the segment; routes are those of the tokens before its last one.
        routes: shape (C, L, K).

    Raises:
        ValueError: they reach further back than the sequence, or are of another model.
    """
    begin = end - 1 - len(routes)
    if begin < 0 or routes.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"routes of shape {routes.shape} for the tokens before the last of {end}, in a batch of shape {target.shape}; "
            "at most one for each of these, and all of one model"
        )
    target[begin : end - 1] = routes
