"""How many tokens' logits are in memory at the same time: the one rule of runtime and memory estimate."""

from __future__ import annotations

LEAST_TOKENS = 1024
SMALL_BYTES = 64 * 2**20
"""Of a chunk's logits that no device misses."""
LOGIT_BYTES = 4
"""Of one logit, which is float32 for any dtype of the model."""


def chunk_tokens(wanted: int | None, vocab_size: int) -> int:
    """Tokens of a chunk.

    Args:
        wanted: ``training.logprobChunkTokens``.
        vocab_size: of the whole vocabulary, also where processes divide it: they must agree.
    """
    return max(LEAST_TOKENS, SMALL_BYTES // (LOGIT_BYTES * vocab_size)) if wanted is None else wanted
