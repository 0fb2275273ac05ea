"""Per-token weights that make a scalar of per-token terms: ``loss = sum_t weight_t * term_t``.

The weights hold GLOBAL denominators, so that the scalar does not depend on how sequences are split over ranks and micro-batches:
each part sums its own terms and the sums add up. With ``m_t`` the mask, ``n_s = sum of m_t in sequence s``, ``G`` global_tokens
and ``Q`` global_sequences:

===================  =====================  =========================================
TokenMean            m_t / G                DAPO, arXiv 2503.14476, eq. 8
SeqMeanTokenMean     m_t / (n_s * Q)        GRPO, arXiv 2402.03300, eq. 3
SeqMeanTokenSum      m_t / Q                Dr. GRPO, arXiv 2503.20783, without its constant length
SeqMeanTokenSumNorm  m_t / (Q * L)          Dr. GRPO with its constant length L
===================  =====================  =========================================
"""

from __future__ import annotations

import torch

from rljob_api.vocabulary import Aggregation


def token_weights(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    aggregation: Aggregation,
    *,
    global_tokens: int,
    global_sequences: int,
    norm_tokens: int | None = None,
) -> torch.Tensor:
    """Weight of every token of a batch.

    Args:
        mask: shape (T,), 1 where a token is trained, else 0.
        lengths: shape (S,), integers that sum to T.
        aggregation: which mean.
        global_tokens: trained tokens of the update over all ranks.
        global_sequences: sequences with at least one trained token of the update over all ranks.
        norm_tokens: L, needed by SeqMeanTokenSumNorm.

    Returns:
        Shape (T,), float32; 0 where the mask is 0. Over all ranks the weights of a ``*Mean`` sum to 1.

    Raises:
        ValueError: a denominator is not positive or smaller than what this batch alone holds, L is missing, or shapes do not fit.
    """
    mask = mask.to(torch.float32)
    if mask.ndim != 1 or int(lengths.sum()) != mask.numel():
        raise ValueError(f"lengths sum to {int(lengths.sum())} but the mask has shape {tuple(mask.shape)}; both must describe T tokens")
    row_of_token = torch.repeat_interleave(torch.arange(lengths.numel()), lengths.to(torch.int64))
    tokens_of_row = torch.zeros(lengths.numel()).index_add_(0, row_of_token, mask)
    local_tokens, local_sequences = int(mask.sum()), int((tokens_of_row > 0).sum())
    if global_tokens < max(local_tokens, 1) or global_sequences < max(local_sequences, 1):
        raise ValueError(
            f"global_tokens={global_tokens}, global_sequences={global_sequences} but this rank alone holds {local_tokens} trained tokens "
            f"in {local_sequences} sequences; sum both over all ranks, and train no update without tokens"
        )
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return mask / global_tokens
        case Aggregation.SEQ_MEAN_TOKEN_MEAN:
            return mask / (tokens_of_row.clamp(min=1)[row_of_token] * global_sequences)
        case Aggregation.SEQ_MEAN_TOKEN_SUM:
            return mask / global_sequences
        case Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            if norm_tokens is None:
                raise ValueError(f"aggregation {aggregation} needs norm_tokens; pass the longest response")
            return mask / (global_sequences * norm_tokens)
