"""How bench.training cuts and pads batches: no side is given other tokens than another."""

from __future__ import annotations

import numpy as np
import pytest

from bench.training.rows import CASES, PADDING, Case, cut_in_order, make_batch, pad_both

VOCAB = 50


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_padded_rows_hold_the_batch(case: Case) -> None:
    batch = make_batch(case, VOCAB, seed=1)
    rows = pad_both(batch)
    ids = np.concatenate([rows.prompt_ids, rows.response_ids], axis=1)
    inside = np.concatenate([rows.prompt_mask, rows.response_mask], axis=1) == 1
    assert np.array_equal(ids[inside], batch.token_ids)
    assert (ids[~inside] == PADDING).all()
    assert int(rows.response_mask.sum()) == batch.global_tokens
    responses = batch.response_mask == 1
    assert np.array_equal(rows.behavior_logprobs[rows.response_mask == 1], batch.behavior_logprobs[responses])
    assert np.array_equal(np.repeat(rows.advantages, rows.response_mask.sum(1)), batch.advantages[responses])


def test_only_mixed_lengths_differ() -> None:
    widths = {case.name: np.unique(make_batch(case, VOCAB, seed=0).lengths).size for case in CASES}
    assert widths["short"] == widths["long"] == 1
    assert widths["mixed"] > 10


def test_runs_are_in_order_and_within_the_budget() -> None:
    lengths = np.array([3, 9, 2, 2, 40, 5, 5, 1], dtype=np.int32)
    runs = cut_in_order(lengths, 20)
    assert [lengths[run].tolist() for run in runs] == [[3, 9], [2, 2], [40], [5, 5, 1]]
    assert cut_in_order(lengths[:0], 20) == []
