"""Rotary positions of latent attention on CPU, where vLLM 0.32 rotates the wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REPAIRED = "repaired_by_rljob"


def by_dimensions(kernel: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    """A method that rotates queries of three dimensions by ``native`` and others by ``kernel``."""

    def rotate(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        return (native if query.ndim == 3 else kernel)(self, positions, query, key)

    setattr(rotate, REPAIRED, True)
    return rotate


def repair_rotary() -> None:
    """Have vLLM's models on CPU rotate queries of three dimensions by torch operations; repeated calls do nothing.

    vLLM's C++ kernel takes the stride of the last dimension but one for that of a token. That is right for queries of shape (tokens,
    heads * size), which most models have; latent attention (MLA) passes (tokens, heads, size), and log-probs are off by tenths of nats,
    with no error. Positions with YaRN (``DeepseekScalingRotaryEmbedding``) are computed by torch operations anyway.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    if not hasattr(RotaryEmbedding.forward_cpu, REPAIRED):
        RotaryEmbedding.forward_cpu = by_dimensions(RotaryEmbedding.forward_cpu, RotaryEmbedding.forward_native)  # type: ignore[method-assign]
