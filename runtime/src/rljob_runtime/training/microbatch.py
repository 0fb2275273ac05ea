"""Cuts a train batch into padded micro-batches; numpy, no torch.

Rows are sorted by length and cut where that is cheapest, with ``rows * width <= token_budget``, padding included. Padding stands right:
under a causal mask no trained token ever looks at it. The last token of a row predicts nothing and is not computed; sequences without a
trained token are left out. Two layouts, chosen by :mod:`~rljob_runtime.training.sharing`:

plain
    One sequence per row: positions are columns, attention is causal, no mask is needed.
shared
    A tree of sequences with equal prompts, depth first, e.g. for the prompt ``a b`` and the responses ``c d .``, ``c e .`` and ``f .``
    (a response's last token is not computed)::

        columns   0 1 2 3 4 5
        tokens    a b c d e f     b predicts c, c and f; c predicts d and e
        positions 0 1 2 3 3 2
        until     6 6 5 4 5 6     a token is seen by itself and later columns before ``until``, that is by its own subtree
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import IntArray
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training.sharing import LINEAR_ONLY, LayerCosts, LongArray, Plan, Sequences, plan_layouts, ranges, sort_by_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass and the N tokens whose log-probs are wanted."""

    input_ids: LongArray
    """Shape (rows, width), right-padded with 0."""
    position_ids: LongArray | None = None
    """Shape (rows, width), in the shared layout; None: columns."""
    until: LongArray | None = None
    """Shape (rows, width), in the shared layout: the token in column k is seen from columns q with ``k <= q < until``."""
    positions: LongArray
    """Shape (N,): index into the flattened (rows * width) hidden states that predict each wanted token; repeats where shared."""
    targets: LongArray
    """Shape (N,): the wanted tokens."""
    sources: LongArray
    """Shape (N,): where each wanted token stands in the flat batch (T,)."""
    possible_ids: LongArray | None = None
    """Shape (M,), where sampling left tokens out: the ids that could be sampled in place of each wanted token; None: all."""
    possible_rows: LongArray | None = None
    """Shape (M,): which of the N wanted tokens each id belongs to, ascending; a token without ids is among all."""
    is_filler: bool = False
    """True for a micro-batch that only keeps this rank in step with the others; its terms weigh 0."""


def make_micro_batches(
    token_ids: IntArray,
    lengths: IntArray,
    wanted: npt.NDArray[np.floating] | npt.NDArray[np.bool_],
    token_budget: int,
    costs: LayerCosts | None = None,
    sampling_mask: SamplingMask | None = None,
) -> list[MicroBatch]:
    """Cut sequences into micro-batches.

    Args:
        token_ids: shape (T,), sequences one after another.
        lengths: shape (S,), sums to T.
        wanted: shape (T,), non-zero where the token's log-prob is needed. What comes before a sequence's first is its prompt.
        token_budget: most tokens of a micro-batch, padding included; a single longer sequence still makes one.
        costs: of the model, to cut where that is cheapest and, if it may share, to compute common prompts once where that is cheaper;
            None shares nothing and counts positions only.
        sampling_mask: of T positions; None where every token could be sampled.

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
    if sampling_mask is not None and sampling_mask.counts.shape != (total,):
        raise ValueError(f"the sampling mask has {sampling_mask.counts.size} positions for {total} tokens; pass one count for each")
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    flags = np.asarray(wanted) != 0
    nonempty = lengths > 0
    if flags[starts[nonempty]].any():
        raise ValueError("the mask is set on the first token of a sequence, which no token predicts; a prompt needs at least one token")
    places = np.flatnonzero(flags)
    first = np.searchsorted(places, starts)
    kept = np.flatnonzero(first < np.searchsorted(places, ends))
    none = np.zeros_like(kept)
    sequences = Sequences(
        starts=starts[kept], prompts=places[first[kept]] - starts[kept], widths=lengths[kept].astype(np.int64) - 1, groups=none, common=none
    )
    costs = costs or LINEAR_ONLY
    if costs.may_share:
        sequences = sort_by_prompt(token_ids, sequences)
    collate = {False: _collate, True: _collate_shared}
    plans = plan_layouts(sequences, token_budget, costs)
    micro_batches = [collate[plan.shared](token_ids, plan, part, sequences, flags) for plan in plans for part in plan.micro_batches]
    return micro_batches if sampling_mask is None else [_restricted(micro, sampling_mask) for micro in micro_batches]


def _restricted(micro: MicroBatch, sampling_mask: SamplingMask) -> MicroBatch:
    """With what could be sampled in place of each wanted token."""
    own = sampling_mask.take(micro.sources)
    return replace(micro, possible_ids=own.token_ids.astype(np.int64), possible_rows=own.rows())


def filler(token_id: int = 0) -> MicroBatch:
    """A cheapest possible micro-batch for a rank that has fewer than the others: one row, one wanted token that weighs 0."""
    zero = np.zeros(1, dtype=np.int64)
    return MicroBatch(input_ids=np.full((1, 1), token_id, dtype=np.int64), positions=zero, targets=zero, sources=zero, is_filler=True)


def _collate(token_ids: IntArray, plan: Plan, part: LongArray, sequences: Sequences, flags: npt.NDArray[np.bool_]) -> MicroBatch:
    """Pad rows of one sequence to the widest and find the wanted tokens; all rows have at least one."""
    starts, widths = sequences.starts[plan.begins[part]], plan.widths[part]
    columns = np.arange(int(widths.max()), dtype=np.int64)
    inside = columns < widths[:, None]
    flat = np.where(inside, starts[:, None] + columns, 0)
    input_ids = np.where(inside, token_ids[flat], 0).astype(np.int64)
    positions = np.flatnonzero(inside & flags[np.where(inside, flat + 1, 0)])
    sources = flat.reshape(-1)[positions] + 1
    return MicroBatch(input_ids=input_ids, positions=positions, targets=token_ids[sources].astype(np.int64), sources=sources)


def _collate_shared(token_ids: IntArray, plan: Plan, part: LongArray, sequences: Sequences, flags: npt.NDArray[np.bool_]) -> MicroBatch:
    """Write rows as trees, pad them to the widest and find the wanted tokens. Places are indexes into the flattened (rows * width)."""
    rows, width = part.size, int(plan.widths[part].max())
    row, nth = ranges(plan.sizes[part])
    members = plan.begins[part][row] + nth
    starts, prompts = sequences.starts[members], sequences.prompts[members]
    bodies = sequences.widths[members] - prompts  # computed tokens behind the prompt
    common = np.where(nth == 0, 0, sequences.common[members])
    ends = np.cumsum(bodies - common)
    ends -= np.concatenate(([0], ends))[np.flatnonzero(nth == 0)][row] - row * width - prompts  # place behind each sequence's own tokens

    owner, depth = ranges(bodies)
    first = np.cumsum(bodies) - bodies
    node = np.where(depth < common[owner], first[owner - 1] + depth, np.arange(owner.size))  # of each token, what it equals
    while not np.array_equal(further := node[node], node):  # and the one before that, until each is at the token that is written
        node = further
    place = ((ends - bodies)[owner] + depth)[node]
    lead = np.flatnonzero(nth == 0)
    prompt_row, column = ranges(prompts[lead])
    input_ids, position_ids = np.zeros((2, rows * width), dtype=np.int64)
    until = np.tile(np.int64(width), rows * width)
    input_ids[prompt_row * width + column] = token_ids[starts[lead][prompt_row] + column]
    position_ids[prompt_row * width + column] = column
    flat = (starts + prompts)[owner] + depth
    input_ids[place], position_ids[place] = token_ids[flat], prompts[owner] + depth
    until[place] = 0
    np.maximum.at(until, place, (ends - row * width)[owner])

    later = flags[flat + 1]
    positions = np.concatenate([row * width + prompts - 1, place[later]])  # a prompt predicts what ended it, the first wanted token
    sources = np.concatenate([starts + prompts, flat[later] + 1])
    order = np.argsort(sources)
    positions, sources = positions[order], sources[order]
    return MicroBatch(
        input_ids=input_ids.reshape(rows, width),
        position_ids=position_ids.reshape(rows, width),
        until=until.reshape(rows, width),
        positions=positions,
        targets=token_ids[sources].astype(np.int64),
        sources=sources,
    )
