"""Which tokens could have been sampled at each position, where top-k, top-p or min-p leave some out.

The engine samples from a part S of the vocabulary and reports log-probs of the distribution over S, so the trainer has to compute
``log p(x) = l_x - log sum_(v in S) exp(l_v)`` over the same S; over the whole vocabulary the ratio of an on-policy token would be the
probability of S, not 1 (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Keep Sampling Mask"). S is not computed again from the trainer's own
logits: where they differ by a rounding from the engine's, the set would be another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SamplingMask:
    """Ids of the tokens that could have been sampled, position after position: 4 bytes for each, and 4 for the position."""

    token_ids: IntArray
    """Shape (M,): M is the sum of the counts."""
    counts: IntArray
    """Shape (P,): ids of each position; 0 where nothing was sampled, and where more tokens were possible than the engine could list."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together.

        Raises:
            ValueError: naming both sizes.
        """
        if self.token_ids.shape != (int(self.counts.sum()),):
            raise ValueError(f"counts sum to {int(self.counts.sum())} but token_ids have shape {self.token_ids.shape}; pass all ids")

    def __eq__(self, other: object) -> bool:
        """Whether all positions have the same ids in the same order."""
        if not isinstance(other, SamplingMask):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.token_ids, other.token_ids)

    __hash__ = None  # type: ignore[assignment]

    @property
    def size_bytes(self) -> int:
        """Of both arrays."""
        return self.token_ids.nbytes + self.counts.nbytes

    def take(self, positions: npt.NDArray[np.integer]) -> SamplingMask:
        """The mask of these positions, in their order."""
        counts = self.counts[positions]
        sizes = counts.astype(np.int64)
        starts = np.cumsum(self.counts, dtype=np.int64)[positions] - sizes
        places = np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(int(sizes.sum()))
        return SamplingMask(token_ids=self.token_ids[places], counts=counts)

    def rows(self) -> npt.NDArray[np.int64]:
        """Shape (M,): the position that each id belongs to, ascending."""
        return np.repeat(np.arange(self.counts.size, dtype=np.int64), self.counts)


def joined(masks: Sequence[SamplingMask]) -> SamplingMask:
    """The positions of all masks, one mask after another; at least one."""
    return SamplingMask(token_ids=np.concatenate([m.token_ids for m in masks]), counts=np.concatenate([m.counts for m in masks]))


def spread(masks: Sequence[SamplingMask], sampled: npt.NDArray[np.bool_]) -> SamplingMask:
    """The masks at the sampled positions among all, with nothing at the others.

    Args:
        masks: of responses in the order of their tokens.
        sampled: shape (T,), as many true as the masks have positions.

    Raises:
        ValueError: another number of them.
    """
    whole = joined(masks)
    if whole.counts.size != np.count_nonzero(sampled):
        raise ValueError(f"sampling masks have {whole.counts.size} positions for {np.count_nonzero(sampled)} sampled tokens")
    counts = np.zeros(sampled.shape, dtype=np.int32)
    counts[sampled] = whole.counts
    return SamplingMask(token_ids=whole.token_ids, counts=counts)
