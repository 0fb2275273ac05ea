"""How the attention goes over a packed row on the CPU; numpy, no torch.

A kernel that takes packed rows exists for CUDA alone. Elsewhere the row is cut into parts that each are one call of a plain kernel:
sequences of similar length, padded for this call only, and the branches of long trees one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.training.sharing import LayerCosts, LongArray, attention_cost, cheapest_cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPart:
    """Sequences, or trees, that are attended to side by side, padded to the widest of them."""

    lengths: LongArray
    """Shape (R,): tokens of each; they stand one after another, behind the part before."""
    masked: bool
    """Whether they are trees, which need ``until``; without it each is causal."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row that it covers."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePart:
    """A tree whose branches are attended to one by one."""

    lengths: LongArray
    """Shape (B,): tokens of each branch, a run of tokens that the same later tokens see; they stand one after another."""
    ancestors: tuple[tuple[int, ...], ...]
    """Of each branch those that it sees as a whole, in order; every one stands before it."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row that it covers."""
        return int(self.lengths.sum())


def attention_parts(
    widths: LongArray, sizes: LongArray, branching: npt.NDArray[np.bool_], until: LongArray, costs: LayerCosts
) -> Iterator[RowsPart | TreePart]:
    """Cut the items of one packed row into parts, in their order.

    Args:
        widths: shape (I,), tokens of each item; branching trees first, then masked trees, then sequences, each kind by descending width.
        sizes: shape (I,), sequences of each item.
        branching: shape (I,), bool.
        until: shape (T,), of the whole row; see :class:`~rljob_runtime.training.microbatch.MicroBatch`.
        costs: of the model.
    """
    begin = 0
    for width in widths[branching].tolist():
        yield _tree_part(until[begin : begin + width] - begin)
        begin += width
    for masked, kind in ((True, ~branching & (sizes > 1)), (False, sizes == 1)):
        of_kind = widths[kind]
        if of_kind.size:
            row_costs = attention_cost(of_kind, costs, masked=masked).tolist()
            cuts = cheapest_cuts(row_costs, [of_kind.size] * of_kind.size, costs.call_flops)
            yield from (RowsPart(lengths=lengths, masked=masked) for lengths in np.split(of_kind, cuts))


def _tree_part(until: LongArray) -> TreePart:
    """Branches of the tree whose tokens are seen until these columns, shape (W,), counted from its own first.

    A token belongs to the branch of the token before it if the same later tokens see both: then the second continues the first.
    """
    first = np.flatnonzero(np.concatenate(([True], until[1:] != until[:-1])))
    lengths = np.diff(np.concatenate((first, [until.size])))
    path: list[int] = []
    ancestors = []
    ends = until[first].tolist()
    for branch, begin in enumerate(first.tolist()):
        while path and ends[path[-1]] <= begin:
            path.pop()
        ancestors.append(tuple(path))
        path.append(branch)
    return TreePart(lengths=lengths, ancestors=tuple(ancestors))
