"""Attention over packed rows beside a dense mask: the kernel that a GPU takes, forward and backward, in short and in long rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from bench.gpu_check.lines import Line, at_most
from bench.gpu_check.scale import Scale
from rljob_runtime.training.attention import Packing, tree_mask
from rljob_runtime.training.microbatch import PackedRow
from rljob_runtime.training.packing import RowsPart

HEADS = ((16, 2, 128), (14, 2, 64))
"""Of Qwen2.5-3B and -0.5B: query heads, key heads, size."""
ROWS = {"short": (31, 20, 9), "long": (700, 500, 257, 40)}
"""Lengths of the sequences in a row. By default FlexAttention has another kernel for fewer than 128 tokens."""
TOLERANCE = {"bfloat16": 0.02, "float32": 1e-5}
"""Of the largest number: eight bits, rounded a few times."""


def check(scale: Scale) -> Iterator[Line]:
    """The largest difference of results and gradients as a share of the largest number, for each row and number of heads."""
    for name, lengths in ROWS.items():
        row = packed(np.array(lengths))
        for heads, key_heads, size in HEADS:
            what = f"{name} row of {sum(lengths)} tokens, {heads} heads over {key_heads}"
            scale.begin(what)
            bound = TOLERANCE[scale.dtype]
            yield at_most("attention", what, difference(row, heads, key_heads, size, scale), "of the largest number", bound)


def packed(lengths: np.ndarray) -> PackedRow:
    """Sequences one after another, longest first; shape of ``lengths``: (R,)."""
    ends = np.cumsum(lengths)
    return PackedRow(
        position_ids=np.concatenate([np.arange(length) for length in lengths])[None],
        until=np.repeat(ends, lengths),
        parts=tuple(RowsPart(lengths=lengths[place : place + 1], masked=False) for place in range(lengths.size)),
    )


def difference(row: PackedRow, heads: int, key_heads: int, size: int, scale: Scale) -> float:
    """Largest difference of result and of the three gradients, each as a share of its largest number."""
    torch.manual_seed(0)
    tokens = row.until.size
    given = [torch.randn(1, tokens, n, size, device=scale.device, dtype=getattr(torch, scale.dtype)) for n in (heads, key_heads, key_heads)]
    weights = torch.randn(1, tokens, heads, size, device=scale.device)

    def both(dense: bool) -> list[torch.Tensor]:
        own = [one.float() if dense else one.clone() for one in given]
        query, key, value = (one.requires_grad_().transpose(1, 2) for one in own)
        if dense:
            mask = tree_mask(torch.from_numpy(row.until).to(scale.device)[None])
            result = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.1, enable_gqa=True)
            result = result.transpose(1, 2)
        else:
            result = Packing(row, scale.device).attend(query, key, value, 0.1)
        (result.float() * weights).sum().backward()
        return [result.detach().float(), *(one.grad.float() for one in own if one.grad is not None)]

    pairs = zip(both(dense=False), both(dense=True), strict=True)
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs)
