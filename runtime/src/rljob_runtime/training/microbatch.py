"""Cuts a train batch into micro-batches of at most ``token_budget`` tokens; numpy, no torch.

The last token of a sequence predicts nothing and is not computed; sequences without a trained token are left out. Two layouts:

packed
    Sequences one after another in one row, without padding, where the model attends within them (:mod:`.attention`). Those with equal
    prompts may be a tree, depth first, if that is cheaper (:mod:`.sharing`), e.g. for the prompt ``a b`` and the responses ``c d .``,
    ``c e .`` and ``f .``, beside the sequence ``g h .``::

        columns   0 1 2 3 4 5 6 7
        tokens    a b c d e f g h   b predicts c, c and f; c predicts d and e
        positions 0 1 2 3 3 2 0 1
        until     6 6 5 4 5 6 8 8   a token is seen by itself and later columns before ``until``, that is by its own subtree

padded
    For all other models: a sequence per row, sorted by length and cut where that is cheapest, ``rows * width <= token_budget``, padding
    included. Padding stands right: under a causal mask no trained token ever looks at it. Positions are columns, no mask is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import IntArray
from rljob_runtime.routes import NO_ROUTE, RouteArray
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training.packing import RowsPart, TreePart, attention_parts
from rljob_runtime.training.sharing import (
    LINEAR_ONLY,
    LayerCosts,
    LongArray,
    Plan,
    Sequences,
    plan_packed,
    plan_rows,
    ranges,
    sort_by_prompt,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """Where sequences begin in a row, and who sees whom."""

    position_ids: LongArray
    """Shape (1, width), of a part of a row (1, width of the part): of each token in its own sequence."""
    until: LongArray
    """Shape (width,): the token in column k is seen from columns q with ``k <= q < until``."""
    parts: tuple[RowsPart | TreePart, ...]
    """The same as calls of the attention; none where one kernel computes the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward pass and the N tokens whose log-probs are wanted."""

    input_ids: LongArray
    """Shape (rows, width), right-padded with 0; packed: (1, width)."""
    packed: PackedRow | None = None
    """What is to be known of a packed row; None: padded rows."""
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
    routes: RouteArray | None = None
    """Shape (rows * width, L, K): experts of each computed token, ``NO_ROUTE`` where there are none and for padding. A token that several
    sequences share has the route of one of them, if one has any."""
    is_filler: bool = False
    """True for a micro-batch that only keeps this rank in step with the others; its terms weigh 0."""


def make_micro_batches(
    token_ids: IntArray,
    lengths: IntArray,
    wanted: npt.NDArray[np.floating] | npt.NDArray[np.bool_],
    token_budget: int,
    costs: LayerCosts | None = None,
    sampling_mask: SamplingMask | None = None,
    routes: RouteArray | None = None,
) -> list[MicroBatch]:
    """Cut sequences into micro-batches.

    Args:
        token_ids: shape (T,), sequences one after another.
        lengths: shape (S,), sums to T.
        wanted: shape (T,), non-zero where the token's log-prob is needed. What comes before a sequence's first is its prompt.
        token_budget: most tokens of a micro-batch, padding included; a single longer sequence still makes one.
        costs: of the model: which layout it takes, and what is cheapest; None pads, and counts positions only.
        sampling_mask: of T positions; None where every token could be sampled.
        routes: shape (T, L, K); None where routers choose.

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
    if routes is not None and routes.shape[:1] != (total,):
        raise ValueError(f"routes have shape {routes.shape} for {total} tokens; pass those of each")
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
    if costs.may_pack:
        if costs.may_share:
            sequences = sort_by_prompt(token_ids, sequences)
        plan = plan_packed(sequences, token_budget, costs)
        micro_batches = [_pack(token_ids, plan, items, sequences, flags, costs, routes) for items in plan.micro_batches]
    else:
        micro_batches = [_pad(token_ids, rows, sequences, flags, routes) for rows in plan_rows(sequences.widths, token_budget, costs)]
    return micro_batches if sampling_mask is None else [_restricted(micro, sampling_mask) for micro in micro_batches]


def _restricted(micro: MicroBatch, sampling_mask: SamplingMask) -> MicroBatch:
    """With what could be sampled in place of each wanted token."""
    own = sampling_mask.take(micro.sources)
    return replace(micro, possible_ids=own.token_ids.astype(np.int64), possible_rows=own.rows())


def filler(token_id: int = 0) -> MicroBatch:
    """A cheapest possible micro-batch for a rank that has fewer than the others: one row, one wanted token that weighs 0."""
    zero = np.zeros(1, dtype=np.int64)
    return MicroBatch(input_ids=np.full((1, 1), token_id, dtype=np.int64), positions=zero, targets=zero, sources=zero, is_filler=True)


def _pad(token_ids: IntArray, rows: LongArray, sequences: Sequences, flags: npt.NDArray[np.bool_], routes: RouteArray | None) -> MicroBatch:
    """Pad rows of one sequence to the widest and find the wanted tokens; all rows have at least one."""
    starts, widths = sequences.starts[rows], sequences.widths[rows]
    columns = np.arange(int(widths.max()), dtype=np.int64)
    inside = columns < widths[:, None]
    flat = np.where(inside, starts[:, None] + columns, 0)
    input_ids = np.where(inside, token_ids[flat], 0).astype(np.int64)
    positions = np.flatnonzero(inside & flags[np.where(inside, flat + 1, 0)])
    sources = flat.reshape(-1)[positions] + 1
    own = None
    if routes is not None:
        own = routes[flat.reshape(-1)]
        own[~inside.reshape(-1)] = NO_ROUTE
    return MicroBatch(input_ids=input_ids, positions=positions, targets=token_ids[sources].astype(np.int64), sources=sources, routes=own)


def _pack(
    token_ids: IntArray,
    plan: Plan,
    items: LongArray,
    sequences: Sequences,
    flags: npt.NDArray[np.bool_],
    costs: LayerCosts,
    routes: RouteArray | None,
) -> MicroBatch:
    """Write items one after another, trees depth first, and find the wanted tokens. Places are columns of the row."""
    item, nth = ranges(plan.sizes[items])
    members = plan.begins[items][item] + nth
    starts, prompts = sequences.starts[members], sequences.prompts[members]
    bodies = sequences.widths[members] - prompts  # computed tokens behind the prompt
    common = np.where(nth == 0, 0, sequences.common[members])
    ends = np.cumsum(bodies - common + np.where(nth == 0, prompts, 0))  # place behind each sequence's own tokens
    item_ends = np.cumsum(plan.widths[items])
    width = int(item_ends[-1])

    owner, depth = ranges(bodies)
    first = np.cumsum(bodies) - bodies
    node = np.where(depth < common[owner], first[owner - 1] + depth, np.arange(owner.size))  # of each token, what it equals
    while not np.array_equal(further := node[node], node):  # and the one before that, until each is at the token that is written
        node = further
    place = ((ends - bodies)[owner] + depth)[node]
    lead = np.flatnonzero(nth == 0)
    begins = item_ends - plan.widths[items]
    prompt_item, column = ranges(prompts[lead])
    written, position_ids = np.zeros((2, width), dtype=np.int64)  # of each column, where its token stands in the flat batch
    until = np.repeat(item_ends, plan.widths[items])
    written[begins[prompt_item] + column] = starts[lead][prompt_item] + column
    position_ids[begins[prompt_item] + column] = column
    flat = (starts + prompts)[owner] + depth
    written[place], position_ids[place] = flat, prompts[owner] + depth
    until[place] = 0
    np.maximum.at(until, place, ends[owner])

    later = flags[flat + 1]
    positions = np.concatenate([begins[item] + prompts - 1, place[later]])  # a prompt predicts what ended it, the first wanted token
    sources = np.concatenate([starts + prompts, flat[later] + 1])
    order = np.argsort(sources)
    positions, sources = positions[order], sources[order]
    parts = () if costs.by_blocks else attention_parts(plan.widths[items], plan.sizes[items], plan.branching[items], until, costs)
    return MicroBatch(
        input_ids=token_ids[written].astype(np.int64)[None],
        packed=PackedRow(position_ids=position_ids[None], until=until, parts=tuple(parts)),
        positions=positions,
        targets=token_ids[sources].astype(np.int64),
        sources=sources,
        routes=None if routes is None else _shared_routes(routes, written, place, flat),
    )


def _shared_routes(routes: RouteArray, written: LongArray, place: LongArray, flat: LongArray) -> RouteArray:
    """Routes of the columns of a packed row, whose tokens are those at ``written``.

    A column at which several response tokens stand, the ``flat`` with this ``place``, takes the route of one that has any: the last token
    of one response may be computed in another.
    """
    own = routes[written]
    there = routes[flat, 0, 0] != NO_ROUTE
    own[place[there]] = routes[flat[there]]
    return own
