"""Sampling settings of drafted tokens on CPU, where vLLM 0.32 loses them."""

from __future__ import annotations

import torch


def expanded(x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
    """vLLM's ``expand_batch_to_tokens``: one value of each request for each of its drafted tokens.

    Args:
        x: shape (R,), by request.
        cu_num_tokens: shape (R,), drafted tokens of the requests up to each of them.
        num_tokens: the last of them.
        replace_from: a value that becomes another one.
        replace_to: the other one.

    Returns:
        Shape (num_tokens,).
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def repair_drafted_sampling() -> None:
    """Have vLLM's CPU runner sample drafted tokens with the settings of their requests.

    vLLM's own function hands its C++ kernel copies of the arguments as integers, and leaves the result uninitialized: temperature and
    top-p of every drafted token are then random bytes, and so are its log-probs, with no error. With top-k, a step in which no request has
    a draft ends the engine: vLLM takes the maximum of no values.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expanded
    constrain = rejection_sampler.apply_sampling_constraints

    def constrained(logits: torch.Tensor, *arguments: object, **keywords: object) -> torch.Tensor:
        return constrain(logits, *arguments, **keywords) if len(logits) else logits

    rejection_sampler.apply_sampling_constraints = constrained
