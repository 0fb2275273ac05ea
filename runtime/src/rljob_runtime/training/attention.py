"""Attention over packed rows: sequences, or trees of them, one after another without padding.

Registered with transformers under the name :data:`PACKED`. Its models hand every keyword of a forward pass on to their attention, so that
a :class:`Packing` reaches it as ``packing``; without one it is transformers' own ``sdpa``.

On the CPU each part of the row is one call of ``scaled_dot_product_attention`` (:mod:`.packing`). On CUDA FlexAttention computes the whole
row in one kernel, which skips what nobody sees in blocks of 128 x 128 (Dong et al., arXiv 2412.05496): sequences and trees alike, by the
one rule ``k <= q < until[k]``. ``tools/gpu-check`` compares it with dense masks on a GPU; here its arithmetic is compared on the CPU, where
FlexAttention has no backward.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from rljob_runtime.training.context_parallel import to_heads, to_tokens
from rljob_runtime.training.microbatch import PackedRow
from rljob_runtime.training.packing import RowsPart, TreePart

PACKED = "rljob_packed"
"""What transformers calls this attention."""
KERNEL = {"BACKEND": "TRITON"}
"""FlexAttention's kernel for rows of any length. The one that it takes for fewer than 128 queries, for decoding, cannot be compiled (torch
2.13) when queries times heads per key head exceed 128: ``NoValidChoicesError`` for 60 tokens of 16 heads over 2, on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows padded to one width for a call of the kernel."""

    num_tokens: int
    shape: tuple[int, int]
    """(R, width)."""
    places: torch.Tensor | None
    """Shape (num_tokens,): where each token stands in the flattened (R * width); None: rows are equally wide."""
    mask: torch.Tensor | None
    """Shape (R, 1, width, width), bool; None: causal."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Shapes (num_tokens, heads, D), of key and value with fewer heads; result as the query, with the value's D."""
        rows, width = self.shape
        q, k, v = (self._pad(one).view(rows, width, *one.shape[1:]).transpose(1, 2) for one in (query, key, value))
        result = _sdpa(q, k, v, scale, self.mask)
        flat = result.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)

    def _pad(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.places is None:
            return tokens
        rows, width = self.shape
        return tokens.new_zeros(rows * width, *tokens.shape[1:]).index_copy(0, self.places, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Branches, each after those that it sees as a whole."""

    num_tokens: int
    lengths: list[int]
    ancestors: tuple[tuple[int, ...], ...]
    masks: list[torch.Tensor | None]
    """Of each branch, shape (own tokens, tokens before and own), bool: causal from the lower right; None: it has no ancestors."""

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Shapes (num_tokens, heads, D), of key and value with fewer heads; result as the query, with the value's D."""
        queries, keys, values = (one.split(self.lengths) for one in (query, key, value))
        results = []
        for branch, (own, ancestors, mask) in enumerate(zip(queries, self.ancestors, self.masks, strict=True)):
            seen = [torch.cat([one[other] for other in (*ancestors, branch)]) for one in (keys, values)]
            q, k, v = (one.transpose(0, 1).unsqueeze(0) for one in (own, *seen))
            results.append(_sdpa(q, k, v, scale, mask).squeeze(0).transpose(0, 1))
        return torch.cat(results)


class Packing:
    """Who sees whom in the packed row of one micro-batch, on the device that computes it."""

    compile_flex: ClassVar[bool] = True
    """False only in tests: FlexAttention as plain operations."""

    def __init__(self, row: PackedRow, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        """Bring to the device what its attention needs.

        Args:
            row: of the micro-batch.
            device: which decides how it is computed.
            group: the ranks that compute a part of the row each (:mod:`.context_parallel`); None: this one computes all of it.
        """
        self._group = group
        self.position_ids = torch.from_numpy(row.position_ids).to(device)
        self.parts: list[Rows | Tree] = []
        self.blocks: BlockMask | None = None
        if device.type == "cuda":
            self.blocks = block_mask(torch.from_numpy(row.until).to(device), compiled=self.compile_flex)
            return
        begin = 0
        for part in row.parts:
            until = row.until[begin : begin + part.num_tokens] - begin
            self.parts.append(_tree(part, device) if isinstance(part, TreePart) else _rows(part, until, device))
            begin += part.num_tokens

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one layer.

        Args:
            query: shape (1, heads, T, D), of a part of the row too.
            key: shape (1, key heads, T, D), where key heads divide heads.
            value: as ``key``; latent attention (DeepSeek) has another D.
            scale: of the scores.

        Returns:
            Shape (1, T, heads, D of the value).
        """
        if self._group is None:
            return self._attend(query, key, value, scale)
        query, key, value = (to_heads(one, self._group) for one in (query, key, value))
        return to_tokens(self._attend(query, key, value, scale), self._group)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """The same over the whole row."""
        if self.blocks is not None:
            result = _flex(query, key, value, self.blocks, scale, compiled=self.compile_flex)
            return result.transpose(1, 2)
        # squeeze, and no split into one: backward of an index or a split copies all of it
        q, k, v = (one.squeeze(0).transpose(0, 1) for one in (query, key, value))
        if len(self.parts) == 1:
            return self.parts[0].attend(q, k, v, scale).unsqueeze(0)
        sizes = [part.num_tokens for part in self.parts]
        pieces = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([part.attend(*own, scale) for part, own in zip(self.parts, pieces, strict=True)]).unsqueeze(0)


@torch.compiler.disable(reason="compiles a kernel of its own, and holds collectives of context parallelism")
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    packing: Packing | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; shapes as those of :meth:`Packing.attend`, and B rows instead of 1 without ``packing``."""
    if packing is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    return packing.attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None


def _no_mask(*_: Any, **__: Any) -> None:
    """The packing says who sees whom; padded rows are causal."""


AttentionInterface.register(PACKED, attention)
AttentionMaskInterface.register(PACKED, _no_mask)


def tree_mask(until: torch.Tensor) -> torch.Tensor:
    """Who sees whom as a dense mask: query q sees key k where ``k <= q < until[k]``.

    Args:
        until: shape (rows, width), see :class:`~rljob_runtime.training.microbatch.PackedRow`.

    Returns:
        Shape (rows, 1, width of queries, width of keys), bool.
    """
    column = torch.arange(until.shape[1], device=until.device)
    query = column[:, None]
    return ((column <= query) & (query < until[:, None, :]))[:, None]


def block_mask(until: torch.Tensor, *, compiled: bool) -> BlockMask:
    """The same for FlexAttention.

    Args:
        until: shape (T,).
        compiled: whether the blocks are found by a compiled kernel, which never holds T x T numbers.
    """

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < until[key])

    make = _compiled(create_block_mask, ()) if compiled else create_block_mask
    blocks: BlockMask = make(sees, None, None, until.shape[0], until.shape[0], device=until.device)
    return blocks


@functools.cache
def _compiled(function: Any, kind: tuple[Any, ...]) -> Any:
    """One compilation for all lengths: micro-batches seldom have the same.

    Args:
        function: of FlexAttention.
        kind: what a compiled kernel is made for. Each counts its recompilations alone: over torch's limit of eight for all together,
            FlexAttention would go on uncompiled, with T x T scores. ``fullgraph`` makes that an error.
    """
    del kind
    make: Any = torch.compile  # whose declared overloads lack isolate_recompiles
    return make(function, dynamic=True, fullgraph=True, isolate_recompiles=True)


def _flex(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: BlockMask, scale: float, *, compiled: bool) -> torch.Tensor:
    kind = (query.dtype, query.shape[1], key.shape[1], query.shape[-1], torch.is_grad_enabled())
    run = _compiled(flex_attention, kind) if compiled else flex_attention
    grouped = query.shape[1] != key.shape[1]
    result: torch.Tensor = run(query, key, value, block_mask=blocks, scale=scale, enable_gqa=grouped, kernel_options=KERNEL)
    return result


def _sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None) -> torch.Tensor:
    """Causal without a mask; shapes (rows, heads, width, D).

    Where values have another D than keys, torch has no fused kernel, and would keep the scores of all pairs: the shorter are padded.
    """
    size, of_value = query.shape[-1], value.shape[-1]
    if of_value < size:
        return _sdpa(query, key, F.pad(value, (0, size - of_value)), scale, mask)[..., :of_value]
    if of_value > size:
        query, key = (F.pad(one, (0, of_value - size)) for one in (query, key))
    groups = query.shape[1] // key.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=groups > 1)
    return F.scaled_dot_product_attention(query, repeat_kv(key, groups), repeat_kv(value, groups), attn_mask=mask, scale=scale)


def _rows(part: RowsPart, until: np.ndarray, device: torch.device) -> Rows:
    lengths, width = part.lengths, int(part.lengths.max())
    inside = np.arange(width) < lengths[:, None]
    places, mask = np.flatnonzero(inside), None
    if part.masked:
        begins = np.cumsum(lengths) - lengths
        padded = np.full(inside.shape, width, dtype=np.int64)  # padding is seen by padding alone, so that no row of scores is empty
        padded[inside] = until - np.repeat(begins, lengths)
        mask = tree_mask(torch.from_numpy(padded).to(device))
    return Rows(
        num_tokens=part.num_tokens,
        shape=(lengths.size, width),
        places=None if inside.all() else torch.from_numpy(places).to(device),
        mask=mask,
    )


def _tree(part: TreePart, device: torch.device) -> Tree:
    lengths: list[int] = part.lengths.tolist()
    masks = [_lower_right(own, sum(lengths[a] for a in before), device) for own, before in zip(lengths, part.ancestors, strict=True)]
    return Tree(num_tokens=part.num_tokens, lengths=lengths, ancestors=part.ancestors, masks=masks)


def _lower_right(own: int, before: int, device: torch.device) -> torch.Tensor | None:
    if not before:
        return None
    return torch.ones(own, before + own, dtype=torch.bool, device=device).tril(before)
