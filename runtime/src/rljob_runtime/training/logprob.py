"""Log-probs of chosen tokens from hidden states, never holding more than one chunk of logits.

Memory is O(chunk * V) instead of O(N * V), in backward too: logits are recomputed chunk by chunk. Why not ``F.linear_cross_entropy``: for
bfloat16 inputs it returns bfloat16 (-10.50 for -10.52), too coarse for a ratio between two policies, and in float32 it took 166 MiB where
this takes 35 (4096 tokens, vocabulary 16384, chunks of 256; ``bench/logprob_memory.py``). Here log-probs are float32 for any input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch.autograd.function import once_differentiable


def selected_logprobs(
    hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor, *, temperature: float, chunk_tokens: int
) -> torch.Tensor:
    """``log softmax(hidden @ head_weight^T / temperature)[targets]``; differentiable once in ``hidden`` and ``head_weight``.

    Args:
        hidden: shape (N, H), float32 or bfloat16.
        head_weight: shape (V, H), same dtype, not sharded.
        targets: shape (N,), int64 in [0, V).
        temperature: above 0.
        chunk_tokens: rows of logits that exist at the same time.

    Returns:
        Shape (N,), float32.

    Raises:
        ValueError: temperature or chunk_tokens is not positive.
    """
    if temperature <= 0.0 or chunk_tokens < 1:
        raise ValueError(f"temperature is {temperature} and chunk_tokens {chunk_tokens}; both must be above 0")
    result: torch.Tensor = _SelectedLogprobs.apply(hidden, head_weight, targets, temperature, chunk_tokens)  # type: ignore[no-untyped-call]
    return result


class _SelectedLogprobs(torch.autograd.Function):
    """Keeps hidden states and the log-normaliser (N numbers); recomputes logits in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor, temperature: float, chunk_tokens: int
    ) -> torch.Tensor:
        log_normaliser = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        result = torch.empty_like(log_normaliser)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = _scaled_logits(hidden[part], head_weight, temperature)
            torch.logsumexp(logits, dim=-1, out=log_normaliser[part])
            result[part] = logits.gather(1, targets[part, None]).squeeze(1) - log_normaliser[part]
        ctx.save_for_backward(hidden, head_weight, targets, log_normaliser)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        """d logp_t / d logits = (onehot(target) - softmax) / temperature."""
        hidden, head_weight, targets, log_normaliser = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # float32, because the head's gradient is a sum over every chunk
        grad_weight = torch.zeros(head_weight.shape, dtype=torch.float32, device=head_weight.device) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], ctx.chunk_tokens):
            part = slice(start, start + ctx.chunk_tokens)
            scale = (grad[part] / ctx.temperature).unsqueeze(1)
            grad_logits = _scaled_logits(hidden[part], head_weight, ctx.temperature)
            grad_logits.sub_(log_normaliser[part, None]).exp_().mul_(-scale)
            grad_logits.scatter_add_(1, targets[part, None], scale)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, head_weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(head_weight.dtype), None, None, None


def _scaled_logits(hidden: torch.Tensor, head_weight: torch.Tensor, temperature: float) -> torch.Tensor:
    """float32 logits of a chunk, a fresh tensor the caller may overwrite."""
    logits = F.linear(hidden, head_weight).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``, in one kernel where dtypes allow."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))
