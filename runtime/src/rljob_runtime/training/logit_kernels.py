"""Passes over a chunk of float32 logits on CUDA, compiled into one kernel each.

A chunk of a large vocabulary is hundreds of megabytes, and what is computed from it little. One operation at a time, ``logsumexp`` reads or
writes it four times and the gradient six; a compiled kernel reads it once (the normalizer by online softmax, arXiv 1805.02867).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def log_normalizers(logits: torch.Tensor) -> torch.Tensor:
    """``log sum_v exp(logits[:, v])``.

    Args:
        logits: shape (C, V), float32.

    Returns:
        Shape (C,), float32.
    """
    return torch.logsumexp(logits, dim=-1)


def logit_gradients(
    logits: torch.Tensor, log_normalizer: torch.Tensor, columns: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Gradient of ``sum_i scale_i log softmax(logits_i)[columns_i]`` with respect to the logits.

    Args:
        logits: shape (C, V), float32.
        log_normalizer: shape (C,), of :func:`log_normalizers`.
        columns: shape (C,), int64.
        scale: shape (C, 1), float32.
        dtype: of the result.

    Returns:
        Shape (C, V): ``scale_i (1[v = columns_i] - p_iv)``.
    """
    column = torch.arange(logits.shape[1], device=logits.device)
    probabilities = (logits - log_normalizer[:, None]).exp()
    chosen = (column == columns[:, None]).to(logits.dtype)
    return (scale * (chosen - probabilities)).to(dtype)


@functools.cache
def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The function as one kernel, for chunks of any length over one vocabulary."""
    run: Any = torch.compile(function, fullgraph=True)

    def call(*arguments: Any) -> torch.Tensor:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(argument, 0)
        result: torch.Tensor = run(*arguments)
        return result

    return call
