"""What could be sampled at each token stays with the token through joining, batching and micro-batches."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.batching import BatchingConfig, score_batches, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.sampling_mask import SamplingMask, joined
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.sharing import LayerCosts
from tests.support.records import make_trajectory

repeatable = settings(deadline=None, derandomize=True, max_examples=60)
SHARING = LayerCosts(linear_flops=1000.0, attention_flops=1.0, overhead_tokens=0, may_share=True)

sets = st.lists(st.integers(0, 99), max_size=5)
positions = st.lists(sets, max_size=8)


def mask_of(rows: list[list[int]]) -> SamplingMask:
    counts = np.array([len(row) for row in rows], dtype=np.int32)
    return SamplingMask(token_ids=np.array([token for row in rows for token in row], dtype=np.int32), counts=counts)


def rows_of(mask: SamplingMask) -> list[list[int]]:
    return [part.tolist() for part in np.split(mask.token_ids, np.cumsum(mask.counts)[:-1])] if mask.counts.size else []


@repeatable
@given(st.lists(positions, min_size=1, max_size=4), st.data())
def test_joined_and_taken_positions_keep_their_ids(parts: list[list[list[int]]], data: st.DataObject) -> None:
    whole = joined([mask_of(part) for part in parts])
    rows = [row for part in parts for row in part]
    assert rows_of(whole) == rows
    assert whole.size_bytes == 4 * (sum(map(len, rows)) + len(rows))
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    taken = whole.take(np.array(chosen, dtype=np.int64))
    assert rows_of(taken) == [rows[i] for i in chosen]
    assert taken.rows().tolist() == [i for i, place in enumerate(chosen) for _ in rows[place]]
    assert whole == mask_of(rows)
    assert whole != mask_of([*rows, []])


def test_ids_without_a_position_are_refused() -> None:
    with pytest.raises(ValueError, match=r"counts sum to 1 but token_ids have shape \(2,\)"):
        SamplingMask(token_ids=np.zeros(2, dtype=np.int32), counts=np.ones(1, dtype=np.int32))


def possible(token: int) -> list[int]:
    """What could be sampled in place of a token; not known for some."""
    return [] if token % 4 == 0 else [token, *range(token % 3)]


@st.composite
def groups_of(draw: st.DrawFn) -> list[Group]:
    """Groups with common prompts and beginnings, whose tokens say what is possible."""
    groups = []
    for group_id in range(draw(st.integers(1, 4))):
        prompt = tuple(range(1, 2 + draw(st.integers(0, 4))))
        members = []
        for index, tokens in enumerate(draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=6), min_size=1, max_size=4))):
            plain = make_trajectory(group_id, index, float(index % 2), tuple(tokens), prompt_tokens=prompt)
            segment = dataclasses.replace(plain.segments[0], sampling_mask=mask_of([possible(token) for token in tokens]))
            members.append(dataclasses.replace(plain, segments=(segment,)))
        groups.append(Group(group_id=group_id, trajectories=tuple(members), failed_samples=0))
    return groups


@repeatable
@given(groups_of(), st.integers(1, 3), st.integers(1, 2), st.integers(4, 40), st.booleans())
def test_every_trained_token_has_its_own_ids_on_every_rank(groups: list[Group], ranks: int, mini: int, budget: int, shared: bool) -> None:
    step = arrange(groups, 0)
    config = BatchingConfig(num_ranks=ranks, mini_batches=mini, epochs=1, temperature=1.0)
    outcome = Rule(RuleConfig(max_response_tokens=8)).apply(step)
    known = np.array([bool(possible(token)) for token in step.token_ids.tolist()])
    np.testing.assert_array_equal(outcome.trained > 0, (step.response_mask > 0) & known)  # what could not be listed is not trained
    batches = [batch for rank in train_batches(step, split(step, config), outcome, config).by_rank for batch in rank]
    found = [(b.token_ids, b.lengths, b.response_mask, b.sampling_mask) for b in batches]
    found += [(b.token_ids, b.lengths, b.wanted, b.sampling_mask) for b in score_batches(step, ranks, config)]
    for token_ids, lengths, wanted, mask in found:
        seen = 0
        for micro in make_micro_batches(token_ids, lengths, wanted, budget, SHARING if shared else None, mask):
            assert micro.possible_ids is not None
            assert micro.possible_rows is not None
            for row, target in enumerate(micro.targets.tolist()):
                assert micro.possible_ids[micro.possible_rows == row].tolist() == possible(target)
            seen += micro.targets.size
        assert seen == np.count_nonzero(wanted)


def test_responses_with_and_without_a_mask_do_not_mix() -> None:
    plain = make_trajectory(0, 0)
    masked = dataclasses.replace(plain, segments=(dataclasses.replace(plain.segments[0], sampling_mask=mask_of([[7], [8]])),))
    with pytest.raises(ValueError, match="1 of 2 sampled segments have a sampling mask"):
        arrange([Group(group_id=0, trajectories=(plain, masked), failed_samples=0)], 0)


def test_a_mask_of_another_length_than_its_response_is_refused() -> None:
    plain = make_trajectory(0, 0)
    masked = dataclasses.replace(plain, segments=(dataclasses.replace(plain.segments[0], sampling_mask=mask_of([[7]])),))
    with pytest.raises(ValueError, match="1 positions for 2 sampled tokens"):
        arrange([Group(group_id=0, trajectories=(masked,), failed_samples=0)], 0)
