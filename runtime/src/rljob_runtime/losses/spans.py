"""Means over stretches of tokens: which of a micro-batch's N tokens belong to one sequence, which to one contiguous run of trained tokens.

Levels above the token need every trained token of their stretch in one micro-batch; micro-batches keep sequences whole and in order.
Sums run over a padded matrix, not with ``index_add``, whose order of additions changes from run to run on CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpans:
    """How many of the N tokens, in order, each stretch holds; both sum to N, and no stretch is empty."""

    sequences: tuple[int, ...]
    """Trained tokens of each sequence."""
    segments: tuple[int, ...]
    """Each contiguous run of trained tokens within a sequence: a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanIndex:
    """The stretches of a whole batch, from which those of its micro-batches are cut."""

    sequence_ids: LongArray
    """Shape (T,)."""
    segment_ids: LongArray
    """Shape (T,); means nothing where the mask is 0."""

    def of(self, sources: LongArray) -> TokenSpans:
        """Stretches of the tokens at flat indexes ``sources`` (N,), which keep the order of each sequence."""
        return TokenSpans(sequences=_run_lengths(self.sequence_ids[sources]), segments=_run_lengths(self.segment_ids[sources]))


def span_index(mask: npt.NDArray[np.floating], lengths: npt.NDArray[np.integer]) -> SpanIndex:
    """Number sequences and contiguous stretches of trained tokens.

    Args:
        mask: shape (T,), non-zero where a token is trained.
        lengths: shape (S,), sums to T.
    """
    sequence_ids = np.repeat(np.arange(lengths.size, dtype=np.int64), lengths)
    trained = np.asarray(mask) != 0
    goes_on = np.zeros(trained.shape, dtype=bool)
    goes_on[1:] = trained[:-1] & (sequence_ids[1:] == sequence_ids[:-1])
    return SpanIndex(sequence_ids=sequence_ids, segment_ids=np.cumsum(trained & ~goes_on, dtype=np.int64) - 1)


def span_sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Sum of each stretch, at each of its tokens.

    Args:
        values: shape (N,), no gradient flows.
        lengths: of the stretches, sums to N.

    Returns:
        Shape (N,).
    """
    return _spread(_sums(values, lengths), lengths)


def span_means(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Mean of each stretch, at each of its tokens; arguments and result as :func:`span_sums`."""
    sums = _sums(values, lengths)
    return _spread(sums / torch.tensor(lengths, dtype=sums.dtype, device=sums.device), lengths)


def _sums(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """One number a stretch."""
    return pad_sequence(list(values.detach().split(list(lengths))), batch_first=True).sum(dim=1)


def _spread(numbers: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """One number a stretch to one a token."""
    return numbers.repeat_interleave(torch.tensor(lengths, device=numbers.device), output_size=sum(lengths))


def _run_lengths(ids: LongArray) -> tuple[int, ...]:
    """Lengths of runs of equal neighbors."""
    borders = np.flatnonzero(np.diff(ids)) + 1
    return tuple(np.diff(np.concatenate(([0], borders, [ids.size]))).tolist())
