"""Decides which sequences compute what they have in common once, and which rows are padded together; numpy, no torch.

The samples of one GRPO group repeat their prompt, and short answers often one another's beginnings. Sharing puts a group into ONE row, a
tree of tokens written depth first: the prompt, then of each response what differs from the one before it. That makes fewer tokens, but a
longer row and a dense mask; :func:`row_cost` says which is cheaper.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What a model's decoder layers cost in the forward pass; the backward's cost is proportional."""

    linear_flops: float
    """Per token, above 0: 2 * parameters of all layers."""
    attention_flops: float
    """Per pair of query and key: 4 * heads * head size * layers (2 for the scores, 2 for the weighted values); 0 where not known."""
    overhead_tokens: int = CPU_OVERHEAD_TOKENS
    """Cost of a micro-batch, whatever is in it."""
    may_share: bool = True
    """Whether the model computes trees of sequences rightly."""


LINEAR_ONLY = LayerCosts(linear_flops=1.0, attention_flops=0.0, may_share=False)
"""For a model of which nothing is known: positions are all that costs (only ratios matter, so 1 per token), and nothing is shared."""


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
    """Micro-batches of one layout. A row holds ``sizes`` sequences from ``begins`` on."""

    shared: bool
    """Whether rows are trees (and so need a mask)."""
    begins: LongArray
    """Shape (R,)."""
    sizes: LongArray
    """Shape (R,): 1 where not shared."""
    widths: LongArray
    """Shape (R,): tokens of each row."""
    micro_batches: list[LongArray]
    """The rows of each micro-batch; widest row first."""


def row_cost(width: npt.ArrayLike, *, shared: bool, costs: LayerCosts) -> npt.NDArray[np.float64]:
    """Forward operations of a row of ``width`` tokens, padding included, for any shape of ``width``.

    ``linear * width + attention * width^2 * (1 if shared else 1/2)``: a causal kernel without a mask skips the half of the score matrix
    above the diagonal, a dense mask makes it compute all of it.
    """
    size = np.asarray(width, dtype=np.float64)
    return costs.linear_flops * size + costs.attention_flops * size**2 * (1.0 if shared else 0.5)


def micro_batch_cost(rows: int, width: int, *, shared: bool, costs: LayerCosts) -> float:
    """``rows`` times :func:`row_cost`, plus ``linear * overhead_tokens``; ``width`` is that of the longest row."""
    return rows * float(row_cost(width, shared=shared, costs=costs)) + costs.linear_flops * costs.overhead_tokens


def plan_cost(plans: list[Plan], costs: LayerCosts) -> float:
    """Forward operations of all micro-batches."""
    return sum(micro_batch_cost(part.size, int(p.widths[part[0]]), shared=p.shared, costs=costs) for p in plans for part in p.micro_batches)


def plan_layouts(sequences: Sequences, token_budget: int, costs: LayerCosts) -> list[Plan]:
    """The cheapest of three layouts: nothing shared, every group shared, or only those that gain by it.

    Args:
        sequences: sorted by :func:`sort_by_prompt` if the model may share.
        token_budget: most tokens of a micro-batch, padding included; a single longer sequence still makes one.
        costs: of the model; decide what is shared, if it may, and where rows are cut.

    Returns:
        One or two plans that together hold every sequence once; never dearer than the plan that shares nothing.
    """
    plain = [_plain(np.arange(len(sequences)), sequences, token_budget, costs)]
    if not costs.may_share or not (np.diff(sequences.groups) == 0).any():
        return plain
    begins, sizes, widths = (np.array(column, dtype=np.int64) for column in zip(*_rows(sequences, token_budget), strict=True))
    options = [plain, [_shared(begins, sizes, widths, token_budget, costs)]]
    alone = np.add.reduceat(row_cost(sequences.widths, shared=False, costs=costs), begins)
    gains = row_cost(widths, shared=True, costs=costs) < alone
    if gains.any() and not gains.all():
        rest = np.flatnonzero(np.repeat(~gains, sizes))
        shared = _shared(begins[gains], sizes[gains], widths[gains], token_budget, costs)
        options.append([shared, _plain(rest, sequences, token_budget, costs)])
    return min(options, key=lambda plans: plan_cost(plans, costs))


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


def plan_rows(widths: npt.NDArray[np.integer], token_budget: int, *, shared: bool, costs: LayerCosts) -> list[LongArray]:
    """The partition of rows into micro-batches with the least sum of :func:`micro_batch_cost`.

    Args:
        widths: shape (R,), tokens computed per row, at least 1.
        token_budget: most tokens of a micro-batch, padding included; a single longer row still makes one.
        shared: whether rows are trees.
        costs: of the model.

    Returns:
        Row indexes of each micro-batch, widest row first; together each row once.
    """
    # Among the best partitions is one that only cuts the sorted rows: put the widest rows where the widest row was, as many as stood
    # there, and so on; no micro-batch gets a wider row than it had.
    order = np.argsort(-widths.astype(np.int64), kind="stable").astype(np.int64)
    ordered = widths[order].astype(np.int64)
    limits = np.arange(1, order.size + 1) + np.maximum(token_budget // ordered - 1, 0)
    row_costs = row_cost(ordered, shared=shared, costs=costs)
    cuts = _cheapest_cuts(row_costs.tolist(), limits.tolist(), costs.linear_flops * costs.overhead_tokens)
    return np.split(order, cuts) if order.size else []


def ranges(counts: LongArray) -> tuple[LongArray, LongArray]:
    """``0 .. count`` of every entry, one after another: the entry each element is of, and its number there."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - (np.cumsum(counts) - counts)[owner]


def _plain(members: LongArray, sequences: Sequences, token_budget: int, costs: LayerCosts) -> Plan:
    """A row per sequence."""
    widths = sequences.widths[members]
    cut = plan_rows(widths, token_budget, shared=False, costs=costs)
    return Plan(shared=False, begins=members, sizes=np.ones_like(members), widths=widths, micro_batches=cut)


def _shared(begins: LongArray, sizes: LongArray, widths: LongArray, token_budget: int, costs: LayerCosts) -> Plan:
    """Rows that are trees."""
    cut = plan_rows(widths, token_budget, shared=True, costs=costs)
    return Plan(shared=True, begins=begins, sizes=sizes, widths=widths, micro_batches=cut)


def _rows(sequences: Sequences, token_budget: int) -> Iterator[tuple[int, int, int]]:
    """(begin, size, width) of a row per group, or of several where a group is over the budget; one sequence alone may be."""
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


def _cheapest_cuts(row_costs: list[float], limits: list[int], overhead: float) -> list[int]:
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
