"""Cuts a train batch into padded micro-batches; numpy, no torch.

Rows are sorted by length and cut so that ``rows * width <= token_budget``, padding included. Padding stands right: under a causal mask
no trained token ever looks at it, so no attention mask is needed. The last token of a row predicts nothing and is not computed;
rows without a trained token are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import IntArray

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass and the N tokens whose log-probs are wanted."""

    input_ids: LongArray
    """Shape (rows, width), right-padded with 0."""
    positions: LongArray
    """Shape (N,): index into the flattened (rows * width) hidden states that predict each wanted token."""
    targets: LongArray
    """Shape (N,): the wanted tokens."""
    sources: LongArray
    """Shape (N,): where each wanted token stands in the flat batch (T,)."""
    is_filler: bool = False
    """True for a micro-batch that only keeps this rank in step with the others; its terms weigh 0."""


def plan_rows(lengths: npt.NDArray[np.integer], token_budget: int) -> list[LongArray]:
    """Partition rows into micro-batches, longest first.

    Args:
        lengths: shape (S,), tokens computed per row, at least 1.
        token_budget: most tokens of a micro-batch, padding included; a single longer row still makes one.

    Returns:
        Row indexes of each micro-batch; together each row once.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable").astype(np.int64)
    plan: list[LongArray] = []
    start = 0
    while start < order.size:
        rows = max(1, token_budget // int(lengths[order[start]]))
        plan.append(order[start : start + rows])
        start += rows
    return plan


def make_micro_batches(
    token_ids: IntArray, lengths: IntArray, wanted: npt.NDArray[np.floating] | npt.NDArray[np.bool_], token_budget: int
) -> list[MicroBatch]:
    """Cut sequences into micro-batches.

    Args:
        token_ids: shape (T,), sequences one after another.
        lengths: shape (S,), sums to T.
        wanted: shape (T,), non-zero where the token's log-prob is needed.
        token_budget: most tokens of a micro-batch, padding included.

    Returns:
        Micro-batches that together want every wanted token once; empty if none is wanted.

    Raises:
        ValueError: shapes do not fit, or a first token is wanted (nothing predicts it).
    """
    total = int(lengths.sum())
    if token_ids.shape != (total,) or wanted.shape != (total,):
        raise ValueError(
            f"lengths sum to {total} but token_ids have shape {token_ids.shape} and the mask {wanted.shape}; pass flat (T,) arrays"
        )
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    flags = np.asarray(wanted) != 0
    nonempty = lengths > 0
    if flags[starts[nonempty]].any():
        raise ValueError("the mask is set on the first token of a sequence, which no token predicts; a prompt needs at least one token")
    before = np.concatenate(([0], np.cumsum(flags, dtype=np.int64)))
    rows = np.flatnonzero(before[ends] > before[starts])
    widths = lengths[rows] - 1
    return [_collate(token_ids, starts[rows[part]], widths[part], flags) for part in plan_rows(widths, token_budget)]


def filler(token_id: int = 0) -> MicroBatch:
    """A cheapest possible micro-batch for a rank that has fewer than the others: one row, one wanted token that weighs 0."""
    zero = np.zeros(1, dtype=np.int64)
    return MicroBatch(input_ids=np.full((1, 1), token_id, dtype=np.int64), positions=zero, targets=zero, sources=zero, is_filler=True)


def _collate(token_ids: IntArray, starts: LongArray, widths: npt.NDArray[np.integer], flags: npt.NDArray[np.bool_]) -> MicroBatch:
    """Pad rows to the widest and find the wanted tokens; all rows have at least one."""
    width = int(widths.max())
    columns = np.arange(width, dtype=np.int64)
    inside = columns < widths[:, None]
    flat = np.where(inside, starts[:, None] + columns, 0)
    input_ids = np.where(inside, token_ids[flat], 0).astype(np.int64)
    positions = np.flatnonzero(inside & flags[np.where(inside, flat + 1, 0)])
    sources = flat.reshape(-1)[positions] + 1
    return MicroBatch(input_ids=input_ids, positions=positions, targets=token_ids[sources].astype(np.int64), sources=sources)
