"""Batches hold every sample's tokens exactly once, whatever the ranks, mini-batches and lengths."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.overlap.batching import BatchingConfig, make_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.records import FloatArray, IntArray
from tests.unit.runtime.builders import make_trajectory


def centred(rewards: FloatArray, group_ids: IntArray) -> FloatArray:
    """An estimator of the test's own: reward minus the mean of everything."""
    return (rewards - rewards.mean()).astype(np.float32)


@st.composite
def groups_of(draw: st.DrawFn) -> list[Group]:
    count = draw(st.integers(1, 6))
    groups = []
    for group_id in range(count):
        lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        prompt = tuple(range(1, 2 + draw(st.integers(0, 5))))
        members = tuple(
            make_trajectory(
                group_id, i, score=float(i % 2), tokens=tuple(100 * group_id + 10 * i + k for k in range(n)), prompt_tokens=prompt
            )
            for i, n in enumerate(lengths)
        )
        groups.append(Group(group_id=group_id, trajectories=members, failed_samples=0))
    return groups


def rows(batch):  # type: ignore[no-untyped-def]
    ends = np.cumsum(batch.lengths)
    for start, end in zip(ends - batch.lengths, ends, strict=True):
        yield tuple(batch.token_ids[start:end].tolist())


@given(groups=groups_of(), ranks=st.integers(1, 4), mini=st.integers(1, 3), epochs=st.integers(1, 2), seed=st.randoms())
def test_every_sample_once_per_epoch_and_order_does_not_matter(groups, ranks, mini, epochs, seed) -> None:  # type: ignore[no-untyped-def]
    config = BatchingConfig(num_ranks=ranks, mini_batches=mini, epochs=epochs, temperature=1.0)
    batches = make_batches(groups, advantage=centred, config=config, version=3)
    assert [len(share) for share in batches] == [mini * epochs] * ranks
    expected = Counter(t.prompt.token_ids + t.completion.token_ids for g in groups for t in g.trajectories)
    found = Counter(row for share in batches for batch in share for row in rows(batch))
    assert found == Counter({row: n * epochs for row, n in expected.items()})
    shuffled = list(groups)
    seed.shuffle(shuffled)
    again = make_batches(shuffled, advantage=centred, config=config, version=3)
    for share, other in zip(batches, again, strict=True):
        for one, two in zip(share, other, strict=True):
            assert np.array_equal(one.token_ids, two.token_ids)
            assert np.array_equal(one.advantages, two.advantages)


@given(groups=groups_of(), ranks=st.integers(1, 3))
def test_masks_log_probs_and_denominators_belong_to_the_response_tokens(groups, ranks) -> None:  # type: ignore[no-untyped-def]
    config = BatchingConfig(num_ranks=ranks, mini_batches=1, epochs=1, temperature=0.7)
    batches = [share[0] for share in make_batches(groups, advantage=centred, config=config, version=3)]
    total = sum(len(t.completion.token_ids) for g in groups for t in g.trajectories)
    assert sum(b.response_mask.sum() for b in batches) == total
    for batch in batches:
        outside = batch.response_mask == 0
        assert batch.global_tokens == total
        assert batch.temperature == 0.7
        assert not batch.behaviour_logprobs[outside].any()
        assert not batch.advantages[outside].any()
        assert (batch.behaviour_logprobs[~outside] < 0).all()
        assert int(batch.lengths.sum()) == len(batch.token_ids)
