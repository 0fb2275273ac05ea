"""Floating-point operations of a decoder, as MFU counts them: what the mathematics needs, whatever is computed twice. Pure.

Per token ``6 M + 6 L H d mean(s)``: M parameters that a token is multiplied with (layers and head, no embedding; of a mixture's experts
those of one token), L layers, H query heads of size d, mean(s) = sum s^2 / sum s over sequences of s tokens under a causal mask
(arXiv 2204.02311, appendix B, halved for the mask). A forward pass alone is a third. With adapters the weights' own gradients are not
computed: ``4 M``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rljob_api.memory import ModelShape


def per_step(shape: ModelShape, lengths: Sequence[int], *, lora: bool) -> float:
    """Of a forward and a backward pass over sequences of these lengths."""
    return (4 if lora else 6) * matrix_parameters(shape) * sum(lengths) + 6 * _attention(shape, lengths)


def per_forward(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Of a forward pass."""
    return 2 * matrix_parameters(shape) * sum(lengths) + 2 * _attention(shape, lengths)


def matrix_parameters(shape: ModelShape) -> int:
    """M."""
    decoder = shape.decoder
    if decoder is None:
        raise ValueError("the sizes of the model's layers are not known")
    passed = decoder.experts_per_token / decoder.num_experts if decoder.num_experts else 0.0
    idle = decoder.expert_parameters - round(decoder.expert_parameters * passed)
    return shape.parameters - decoder.root_parameters + decoder.embedding_parameters - idle


def _attention(shape: ModelShape, lengths: Sequence[int]) -> float:
    assert shape.decoder is not None
    return shape.decoder.num_layers * shape.decoder.query_size * sum(length * length for length in lengths)
