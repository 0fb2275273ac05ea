"""Micro-batches want every wanted token once, stay within the budget and pad little."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.training.microbatch import filler, make_micro_batches, plan_rows

repeatable = settings(deadline=None, derandomize=True, max_examples=60)

batches = st.lists(st.integers(1, 12), min_size=0, max_size=25).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)), st.integers(1, 60))
)


def build(lengths: list[int], flags: list[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    array = np.asarray(lengths, dtype=np.int32)
    wanted = np.asarray(flags, dtype=np.float32)
    wanted[np.cumsum(array) - array] = 0.0
    return np.arange(1, array.sum() + 1, dtype=np.int32), array, wanted


@repeatable
@given(batches)
def test_every_wanted_token_once_predicted_by_its_own_prefix(case: tuple[list[int], list[bool], int]) -> None:
    lengths, flags, budget = case
    tokens, array, wanted = build(lengths, flags)
    row_start = np.repeat(np.cumsum(array) - array, array)
    seen: list[int] = []
    for micro in make_micro_batches(tokens, array, wanted, budget):
        width = micro.input_ids.shape[1]
        for position, target, source in zip(micro.positions, micro.targets, micro.sources, strict=True):
            row, column = divmod(int(position), width)
            prefix = tokens[row_start[source] : source]
            assert micro.input_ids[row, : column + 1].tolist() == prefix.tolist()
            assert target == tokens[source]
        seen += micro.sources.tolist()
    assert sorted(seen) == np.flatnonzero(wanted).tolist()


@repeatable
@given(batches)
def test_budget_holds_unless_a_single_row_is_longer(case: tuple[list[int], list[bool], int]) -> None:
    lengths, flags, budget = case
    for micro in make_micro_batches(*build(lengths, flags), budget):
        assert micro.input_ids.size <= budget or micro.input_ids.shape[0] == 1


@repeatable
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_plan_is_a_partition_sorted_by_length(lengths: list[int], budget: int) -> None:
    plan = plan_rows(np.asarray(lengths, dtype=np.int64), budget)
    order = [int(row) for rows in plan for row in rows]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)


def test_rows_without_wanted_tokens_and_last_tokens_cost_nothing() -> None:
    micro_batches = make_micro_batches(*build([3, 4, 5], [False] * 7 + [True] * 5), 100)
    assert [m.input_ids.tolist() for m in micro_batches] == [[[8, 9, 10, 11]]]


def test_filler_is_one_token() -> None:
    assert filler().is_filler
    assert filler().input_ids.size == 1


def test_refuses_a_wanted_first_token() -> None:
    with pytest.raises(ValueError, match="first token of a sequence"):
        make_micro_batches(np.ones(3, np.int32), np.asarray([3], np.int32), np.ones(3, np.float32), 10)


def test_refuses_arrays_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"lengths sum to 4 but token_ids have shape \(3,\)"):
        make_micro_batches(np.ones(3, np.int32), np.asarray([4], np.int32), np.zeros(3, np.float32), 10)
