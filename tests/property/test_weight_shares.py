"""How buckets are shared out over senders."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.shares import MIN_SHARE_BYTES, bucket_bytes, shared_out

SENDERS = st.lists(st.integers(0, 63), min_size=1, max_size=9, unique=True).map(sorted)


@given(SENDERS, st.lists(st.integers(1, 4000), min_size=1, max_size=40))
def test_every_bucket_is_sent_once_in_order_and_by_senders_alone(senders: list[int], sizes: list[int]) -> None:
    manifest = plan_buckets([(f"model.layers.{i}.weight", "uint8", (size,)) for i, size in enumerate(sizes)], 2000)
    parts = shared_out(manifest, senders)
    assert [bucket.index for part in parts for bucket in part.values()] == list(range(len(manifest.buckets)))
    assert {rank for part in parts for rank in part} <= set(senders)
    counts = [sum(rank in part for part in parts) for rank in senders]
    assert max(counts) - min(counts) <= 1
    # a sender's bucket of part p is the p-th of its own: where its segments take turns it is found by that number
    assert all(set(later) <= set(earlier) for earlier, later in itertools.pairwise(parts))


@given(st.integers(1, 2**40), st.integers(1024, 2**34), st.integers(1, 512))
def test_buckets_are_small_enough_for_every_sender_to_have_one_unless_that_is_too_little(total: int, limit: int, senders: int) -> None:
    size = bucket_bytes(total, limit, senders)
    assert 1 <= size <= limit
    assert size <= max(MIN_SHARE_BYTES, -(-total // senders))
    if senders == 1:
        assert size == min(limit, max(total, MIN_SHARE_BYTES))
