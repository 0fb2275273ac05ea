"""Decides which sequences compute what they have in common once, and which stand in one micro-batch; numpy, no torch.

The samples of one GRPO group repeat their prompt, and short answers often one another's beginnings. Sharing puts a group into one tree of
tokens written depth first: the prompt, then of each response what differs from the one before it. That makes fewer tokens, and either
more calls of the attention or a dense mask; :func:`tree_attention` and :func:`row_cost` say what is cheapest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import IntArray

LongArray = npt.NDArray[np.int64]

CPU_OVERHEAD_TOKENS = 256
"""What one more micro-batch costs whatever is in it (launching its operators, gathering shards), in tokens of linear work: 120 to 170
measured for the quickstart's model on one CPU core."""
ACCELERATOR_OVERHEAD_TOKENS = 2048
"""The same on devices that compute faster than they are given work. An estimate, not measured."""
CPU_CALL_FLOPS = 1.5e6
"""What one more call of the attention costs on the CPU, per layer: 150 microseconds with its backward, at 30e9 operations a second,
of which a third is the forward's (measured on one core with AVX-512). On accelerators all sequences of a micro-batch are one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What a model's decoder layers cost in the forward pass; the backward's cost is proportional."""

    linear_flops: float
    """Per token, above 0: 2 * parameters of all layers."""
    attention_flops: float
    """Per pair of query and key: 4 * heads * head size * layers (2 for the scores, 2 for the weighted values); 0 where not known."""
    call_flops: float = 0.0
    """Cost of calling the attention once more in every layer, whatever it computes."""
    by_blocks: bool = False
    """Whether one call computes the attention of a whole packed row, and skips what nobody sees."""
    overhead_tokens: int = CPU_OVERHEAD_TOKENS
    """Cost of a micro-batch, whatever is in it."""
    may_pack: bool = True
    """Whether the model attends within sequences that stand in one row (:mod:`rljob_runtime.training.attention`)."""
    may_share: bool = True
    """Whether it may compute common prompts once, in trees; only where it may pack."""


LINEAR_ONLY = LayerCosts(linear_flops=1.0, attention_flops=0.0, may_pack=False, may_share=False)
"""For a model of which nothing is known: positions are all that costs (only ratios matter, so 1 per token), and rows are padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences with wanted tokens, arrays of shape (S,)."""

    starts: LongArray
    """Where each begins in the flat batch."""
    prompts: LongArray
    """Tokens before the first wanted one, at least 1."""
    widths: LongArray
    """Tokens to compute when alone: all but the last, which predicts nothing."""
    groups: LongArray
    """Equal where prompts are; ascending after :func:`sort_by_prompt`."""
    common: LongArray
    """Tokens after the prompt that equal those of the sequence before it, all of them computed; 0 for the first of a group."""

    def __len__(self) -> int:
        """S."""
        return self.starts.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which sequences stand in which packed micro-batch. An item is ``sizes`` sequences from ``begins`` on: one, or a tree of several."""

    begins: LongArray
    """Shape (I,)."""
    sizes: LongArray
    """Shape (I,)."""
    widths: LongArray
    """Shape (I,): tokens of each item."""
    branching: npt.NDArray[np.bool_]
    """Shape (I,): trees whose attention is computed branch by branch; others of several sequences have a dense mask."""
    micro_batches: list[LongArray]
    """Items of each micro-batch: branching trees, masked trees, sequences; each kind by descending width."""


def row_cost(width: npt.ArrayLike, costs: LayerCosts) -> npt.NDArray[np.float64]:
    """Forward operations of a causal row of ``width`` tokens, padding included, for any shape of ``width``.

    ``linear * width + attention * width^2 / 2``: a causal kernel without a mask skips the half of the score matrix above the diagonal.
    """
    size = np.asarray(width, dtype=np.float64)
    return costs.linear_flops * size + attention_cost(size, costs)


def attention_cost(width: npt.ArrayLike, costs: LayerCosts, *, masked: bool = False) -> npt.NDArray[np.float64]:
    """The attention's part of :func:`row_cost`; twice that where a mask makes the kernel compute the whole score matrix."""
    return costs.attention_flops * np.square(np.asarray(width, dtype=np.float64)) * (1.0 if masked else 0.5)


def micro_batch_cost(rows: int, width: int, costs: LayerCosts) -> float:
    """``rows`` padded to ``width`` times :func:`row_cost`, plus ``linear * overhead_tokens``."""
    return rows * float(row_cost(width, costs)) + costs.linear_flops * costs.overhead_tokens


def plan_packed(sequences: Sequences, token_budget: int, costs: LayerCosts) -> Plan:
    """Sequences without padding: which share a tree, and which stand in one micro-batch.

    Args:
        sequences: sorted by :func:`sort_by_prompt` if the model may share.
        token_budget: most tokens of a micro-batch; a single longer sequence still makes one.
        costs: of the model; decide which groups are trees, and how these are attended to.

    Returns:
        A plan that holds every sequence once. Micro-batches are filled in order, which makes nearly as few as there can be.
    """
    count = len(sequences)
    begins, sizes, widths = np.arange(count), np.ones(count, dtype=np.int64), sequences.widths
    branching = np.zeros(count, dtype=np.bool_)
    if costs.may_share and (np.diff(sequences.groups) == 0).any():
        trees = np.array(list(_rows(sequences, token_budget)), dtype=np.int64)
        begins, sizes, widths, branching = _where_it_gains(trees[:, 0], trees[:, 1], trees[:, 2], sequences, costs)
    kinds = np.where(branching, 0, np.where(sizes > 1, 1, 2))
    order = np.lexsort((-widths, kinds))
    begins, sizes, widths, branching = begins[order], sizes[order], widths[order], branching[order]
    cuts, filled = [], 0
    for index, width in enumerate(widths.tolist()):
        if index and filled + width > token_budget:
            cuts.append(index)
            filled = 0
        filled += width
    items = np.split(np.arange(order.size), cuts) if order.size else []
    return Plan(begins=begins, sizes=sizes, widths=widths, branching=branching, micro_batches=items)


def tree_attention(sequences: Sequences, begins: LongArray, sizes: LongArray, costs: LayerCosts) -> npt.NDArray[np.float64]:
    """Forward operations of the attention of trees, branch by branch, shape of ``begins``.

    Each sequence's own tokens see all before them: ``own * (before + own / 2)`` by blocks; as calls ``own * (before + own)``, because a
    mask makes the kernel compute all of it. The prompt is causal.
    """
    before = sequences.prompts + sequences.common
    own = (sequences.widths - before).astype(np.float64)
    pairs = np.add.reduceat(own * (before + own * (0.5 if costs.by_blocks else 1.0)), begins)
    pairs += 0.5 * sequences.prompts[begins].astype(np.float64) ** 2
    return costs.attention_flops * pairs + costs.call_flops * (sizes + 1)


def sort_by_prompt(token_ids: IntArray, sequences: Sequences) -> Sequences:
    """Bring equal prompts together, wherever they stand, and responses with equal beginnings side by side; fills ``groups`` and ``common``.

    Groups are in order of appearance, responses in order of their tokens.
    """
    found: dict[bytes, int] = {}
    keys = []
    ordered = token_ids.astype(">i4")  # big-endian bytes of numbers that are not negative compare like the numbers
    for start, size, width in zip(sequences.starts.tolist(), sequences.prompts.tolist(), sequences.widths.tolist(), strict=True):
        prompt = ordered[start : start + size].tobytes()
        keys.append((found.setdefault(prompt, len(found)), ordered[start + size : start + width].tobytes()))
    order = np.array(sorted(range(len(keys)), key=keys.__getitem__), dtype=np.int64)
    starts, prompts, widths = sequences.starts[order], sequences.prompts[order], sequences.widths[order]
    groups = np.array([keys[i][0] for i in order.tolist()], dtype=np.int64)
    bodies = widths - prompts
    compared = np.where(groups[1:] == groups[:-1], np.minimum(bodies[1:], bodies[:-1]), 0)
    owner, within = ranges(compared)
    begin = starts + prompts
    differs = np.flatnonzero(token_ids[begin[1:][owner] + within] != token_ids[begin[:-1][owner] + within])
    pairs, first = np.unique(owner[differs], return_index=True)
    compared[pairs] = within[differs][first]
    return Sequences(starts=starts, prompts=prompts, widths=widths, groups=groups, common=np.concatenate(([0], compared))[: order.size])


def plan_rows(widths: npt.NDArray[np.integer], token_budget: int, costs: LayerCosts) -> list[LongArray]:
    """The partition of padded rows into micro-batches with the least sum of :func:`micro_batch_cost`.

    Args:
        widths: shape (R,), tokens computed per row, at least 1.
        token_budget: most tokens of a micro-batch, padding included; a single longer row still makes one.
        costs: of the model.

    Returns:
        Row indexes of each micro-batch, widest row first; together each row once.
    """
    # Among the best partitions is one that only cuts the sorted rows: put the widest rows where the widest row was, as many as stood
    # there, and so on; no micro-batch gets a wider row than it had.
    order = np.argsort(-widths.astype(np.int64), kind="stable").astype(np.int64)
    ordered = widths[order].astype(np.int64)
    limits = np.arange(1, order.size + 1) + np.maximum(token_budget // ordered - 1, 0)
    row_costs = row_cost(ordered, costs)
    cuts = cheapest_cuts(row_costs.tolist(), limits.tolist(), costs.linear_flops * costs.overhead_tokens)
    return np.split(order, cuts) if order.size else []


def ranges(counts: LongArray) -> tuple[LongArray, LongArray]:
    """``0 .. count`` of every entry, one after another: the entry each element is of, and its number there."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]


def _where_it_gains(
    begins: LongArray, sizes: LongArray, widths: LongArray, sequences: Sequences, costs: LayerCosts
) -> tuple[LongArray, LongArray, LongArray, npt.NDArray[np.bool_]]:
    """Begins, sizes, widths and whether it branches of each item: trees where these are cheaper, their sequences alone where not."""
    by_branch, masked = tree_attention(sequences, begins, sizes, costs), attention_cost(widths, costs, masked=True)
    shared = costs.linear_flops * widths + np.minimum(by_branch, masked)
    gains = (sizes > 1) & (shared < np.add.reduceat(row_cost(sequences.widths, costs), begins))
    rest = np.flatnonzero(np.repeat(~gains, sizes))
    return (
        np.concatenate([begins[gains], rest]),
        np.concatenate([sizes[gains], np.ones_like(rest)]),
        np.concatenate([widths[gains], sequences.widths[rest]]),
        np.concatenate([by_branch[gains] <= masked[gains], np.zeros(rest.size, dtype=np.bool_)]),
    )


def _rows(sequences: Sequences, token_budget: int) -> Iterator[tuple[int, int, int]]:
    """(begin, size, width) of a tree per group, or of several where a group is over the budget; one sequence alone may be."""
    begin = width = 0
    previous = -1
    columns = (sequences.groups.tolist(), sequences.widths.tolist(), (sequences.widths - sequences.prompts - sequences.common).tolist())
    for index, (group, alone, added) in enumerate(zip(*columns, strict=True)):
        if index > 0 and (group != previous or width + added > token_budget):
            yield begin, index - begin, width
            begin, width = index, 0
        width = alone if index == begin else width + added
        previous = group
    yield begin, len(sequences) - begin, width


def cheapest_cuts(row_costs: list[float], limits: list[int], overhead: float) -> list[int]:
    """Where to cut a list of rows so that the parts cost least; a part costs its first row times its size, plus ``overhead``.

    ``least(done) = min over begin of least(begin) + overhead + (done - begin) * row_costs[begin]`` with ``done <= limits[begin]``: for each
    begin a line over ``done``. Later lines rise less and end later, so once a later one is below an earlier one, or that has ended, it
    stays the better of the two. A queue therefore holds the lines that will still be lowest somewhere, in the order of their turns, and
    all is done in O(rows) (Hirschberg and Larmore, The least weight subsequence problem, SIAM J. Comput. 16, 1987).

    Args:
        row_costs: not increasing.
        limits: of a part that begins at each row, the furthest end; increasing, and above the row's index.
        overhead: of a part, at least 0.

    Returns:
        Indexes of the rows before which to cut, ascending, without 0.
    """
    offsets: list[float] = []  # each line's height at done = 0
    chosen: list[int] = []  # begin of the last of the cheapest parts that end behind each row
    queue: list[int] = []
    turns: list[int] = []  # the first end at which each of the queue is lowest
    head, least = 0, 0.0
    for begin, rate in enumerate(row_costs):
        offset = least + overhead - begin * rate
        offsets.append(offset)
        turn = begin + 1
        while len(queue) > head:
            last = queue[-1]
            turn, slope = limits[last] + 1, row_costs[last] - rate
            if slope > 0:
                turn = min(turn, math.floor((offset - offsets[last]) / slope) + 1)
            if turn > turns[-1]:
                break
            queue.pop()  # its turn would be over before it comes
            turns.pop()
        queue.append(begin)
        turns.append(turn)
        done = begin + 1
        while head + 1 < len(queue) and turns[head + 1] <= done:
            head += 1
        chosen.append(queue[head])
        least = offsets[queue[head]] + done * row_costs[queue[head]]
    cuts: list[int] = []
    begin = len(row_costs)
    while begin > 0 and (begin := chosen[begin - 1]) > 0:
        cuts.append(begin)
    return cuts[::-1]
