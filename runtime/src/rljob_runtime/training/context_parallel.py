"""Context parallelism: the ranks of a group compute a part each of the same packed row (DeepSpeed-Ulysses, arXiv 2309.14509).

A rank has ``width / cp`` consecutive columns through embedding, projections, MLP and head. Attention alone sees the whole row, of
``heads / cp`` heads: two all-to-all exchanges around it turn columns into heads and back, so that any kernel and any mask
(:mod:`.attention`) serve as they are::

    rank 0   columns 0..3, heads 0..7  --exchange->  columns 0..7, heads 0..3  --attention, exchange->  columns 0..3, heads 0..7
    rank 1   columns 4..7, heads 0..7  --exchange->  columns 0..7, heads 4..7  --attention, exchange->  columns 4..7, heads 0..7

What predicts a token across a cut is no special case: positions and targets are made of the whole row before it is cut. Then every rank
gets the log-probs of all wanted tokens and makes the whole loss of them, because some losses look at sequences; its gradient enters on
each rank through the tokens computed there, so that gradients of parameters are sums over the group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv

from rljob_runtime.errors import ModelError
from rljob_runtime.routes import NO_ROUTE
from rljob_runtime.training.microbatch import MicroBatch, PackedRow
from rljob_runtime.training.packing import RowsPart
from rljob_runtime.training.sharing import LayerCosts, LongArray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPart:
    """What one rank computes of a micro-batch."""

    micro: MicroBatch
    """Its columns, and the wanted tokens that they predict; who sees whom is still said of the whole row, padded to a multiple of cp."""
    own: LongArray
    """Shape (N of this rank,): which of the N wanted tokens of the whole micro-batch these are."""
    num_wanted: int
    """N of the whole micro-batch."""


def part_of(micro: MicroBatch, rank: int, size: int) -> RowPart:
    """This rank's part of a packed row.

    Args:
        micro: packed.
        rank: in its group.
        size: of the group.
    """
    assert micro.packed is not None
    width = micro.input_ids.shape[1]
    columns = -(-width // size)
    padding, begin = columns * size - width, rank * columns
    here = slice(begin, begin + columns)
    own = np.flatnonzero((micro.positions >= begin) & (micro.positions < begin + columns))
    row = _padded(micro.packed, padding)
    part = replace(
        micro,
        input_ids=np.pad(micro.input_ids, ((0, 0), (0, padding)))[:, here],
        packed=replace(row, position_ids=row.position_ids[:, here]),
        positions=micro.positions[own] - begin,
        targets=micro.targets[own],
        sources=micro.sources[own],
    )
    if micro.possible_ids is not None and micro.possible_rows is not None:
        kept = np.isin(micro.possible_rows, own)
        rows = np.searchsorted(own, micro.possible_rows[kept])
        part = replace(part, possible_ids=micro.possible_ids[kept], possible_rows=rows)
    if micro.routes is not None:
        part = replace(part, routes=np.pad(micro.routes, ((0, padding), (0, 0), (0, 0)), constant_values=NO_ROUTE)[here])
    return RowPart(micro=part, own=own, num_wanted=micro.positions.size)


def _padded(row: PackedRow, padding: int) -> PackedRow:
    """The row with a sequence behind it that nobody looks at."""
    if not padding:
        return row
    width = row.until.size + padding
    return PackedRow(
        position_ids=np.concatenate([row.position_ids, np.arange(padding, dtype=np.int64)[None]], axis=1),
        until=np.concatenate([row.until, np.full(padding, width, dtype=np.int64)]),
        parts=(*row.parts, RowsPart(lengths=np.array([padding], dtype=np.int64), masked=False)) if row.parts else (),
    )


def check_context_parallel(model: PreTrainedModel, costs: LayerCosts, *, cp_size: int, tp_size: int) -> None:
    """Refuse a model whose sequences cannot be divided.

    Args:
        model: not yet sharded.
        costs: of it, which say whether it computes packed rows.
        cp_size: context-parallel ranks.
        tp_size: tensor-parallel ranks, which have divided the heads already.

    Raises:
        ModelError: saying what does not fit.
    """
    if cp_size == 1:
        return
    config = model.config.get_text_config()
    if not costs.may_pack:
        raise ModelError(
            f"context_parallel_size is {cp_size}, but model type {config.model_type} with attention {config._attn_implementation} does not "
            "compute packed rows (that takes sdpa and layers that all attend to all earlier tokens); set contextParallelSize to 1"
        )
    rope = str(getattr(model.base_model.rotary_emb, "rope_type", "default"))
    if "dynamic" in rope or rope == "longrope":
        raise ModelError(
            f"context_parallel_size is {cp_size}, but the model's rope_type is {rope}: its rotations follow the last position of a row, "
            "of which each rank would see its own; set contextParallelSize to 1"
        )
    if config.num_attention_heads % (cp_size * tp_size) != 0:
        raise ModelError(
            f"context_parallel_size * tensor_parallel_size is {cp_size} * {tp_size} but the model has num_attention_heads "
            f"{config.num_attention_heads}; choose a divisor of it"
        )


def to_heads(tokens: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """From this rank's columns of all heads to all columns of its heads; differentiable, as all ranks of the group must call it.

    Args:
        tokens: shape (1, heads, width / cp, D). Heads that cp does not divide are repeated until it does, each next to itself, so that
            those of keys stay with their queries'.
        group: the cp ranks.

    Returns:
        Shape (1, heads x repeats / cp, width, D).
    """
    size = group.size()
    heads = repeat_kv(tokens, size // math.gcd(size, tokens.shape[1])).squeeze(0).transpose(0, 1)
    by_rank = heads.unflatten(1, (size, -1)).transpose(0, 1)
    return _exchange(by_rank, group).flatten(0, 1).transpose(0, 1).unsqueeze(0)


def to_tokens(heads: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Back: from shape (1, width, heads / cp, D) to (1, width / cp, heads, D)."""
    by_rank = heads.squeeze(0).unflatten(0, (group.size(), -1))
    return _exchange(by_rank, group).transpose(0, 1).flatten(1, 2).unsqueeze(0)


def gather_numbers(numbers: torch.Tensor, part: RowPart, group: dist.ProcessGroup) -> torch.Tensor:
    """Numbers of all wanted tokens, (..., N), equal on all ranks of the group, from each rank's own; gradients go to who computed them."""
    own = torch.from_numpy(part.own).to(numbers.device)
    result: torch.Tensor = _Gather.apply(numbers, own, part.num_wanted, group)  # type: ignore[no-untyped-call]
    return result


def _exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Block i of dimension 0 goes to rank i; shapes of all ranks are equal."""
    result: torch.Tensor = _Exchange.apply(blocks, group)  # type: ignore[no-untyped-call]
    return result


class _Exchange(torch.autograd.Function):
    """All-to-all, whose backward is itself."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all(grad, ctx.group), None


def all_to_all(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Block i of each rank, on rank i."""
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _Gather(torch.autograd.Function):
    """A sum of what each rank has in its places and zeros elsewhere, which is exact."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, own: torch.Tensor, num_wanted: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(own)
        whole = numbers.new_zeros(*numbers.shape[:-1], num_wanted).index_copy_(-1, own, numbers)
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (own,) = ctx.saved_tensors
        return grad.index_select(-1, own), None, None, None
