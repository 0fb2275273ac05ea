"""Chunks of logits: what was asked for, else what no device misses."""

import pytest

from rljob_api.logit_chunks import LEAST_TOKENS, LOGIT_BYTES, SMALL_BYTES, chunk_tokens


@pytest.mark.parametrize(("wanted", "vocab_size", "tokens"), [(7, 100, 7), (None, 1024, 16_384), (None, 151_936, LEAST_TOKENS)])
def test_a_small_vocabulary_has_larger_chunks_by_default(wanted: int | None, vocab_size: int, tokens: int) -> None:
    assert chunk_tokens(wanted, vocab_size) == tokens


def test_the_default_is_within_its_bytes_or_the_least_tokens() -> None:
    for vocab_size in range(1, 300_000, 997):
        tokens = chunk_tokens(None, vocab_size)
        assert tokens == LEAST_TOKENS or LEAST_TOKENS < tokens <= SMALL_BYTES / (LOGIT_BYTES * vocab_size)
