"""Group advantages: references in plain Python, and the laws they must keep for any rewards and grouping."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.losses.advantage import group_advantages, leave_one_out

repeatable = settings(deadline=None, derandomize=True, max_examples=60)

samples = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 4)), min_size=1, max_size=40)


def columns(pairs: list[tuple[float, int]]) -> tuple[list[float], list[int]]:
    return [r for r, _ in pairs], [g for _, g in pairs]


@repeatable
@given(samples, st.booleans())
def test_equals_the_formula_group_by_group(pairs: list[tuple[float, int]], normalize_std: bool) -> None:
    rewards, groups = columns(pairs)
    result = group_advantages(rewards, groups, normalize_std=normalize_std, eps=1e-3)
    for reward, group, advantage in zip(rewards, groups, result, strict=True):
        members = [r for r, g in pairs if g == group]
        expected = reward - statistics.fmean(members) if len(set(members)) > 1 else 0.0
        if normalize_std and len(members) > 1:
            expected /= statistics.stdev(members) + 1e-3
        assert advantage == pytest.approx(expected, abs=1e-4)


@repeatable
@given(samples)
def test_leave_one_out_equals_the_formula(pairs: list[tuple[float, int]]) -> None:
    result = leave_one_out(*columns(pairs))
    for index, (reward, group) in enumerate(pairs):
        others = [r for i, (r, g) in enumerate(pairs) if g == group and i != index]
        assert result[index] == pytest.approx(reward - statistics.fmean(others) if others else 0.0, abs=1e-4)


@repeatable
@given(samples, st.booleans())
def test_each_group_sums_to_zero(pairs: list[tuple[float, int]], normalize_std: bool) -> None:
    rewards, groups = columns(pairs)
    result = group_advantages(rewards, groups, normalize_std=normalize_std)
    for group in set(groups):
        assert result[np.asarray(groups) == group].sum() == pytest.approx(0.0, abs=1e-3)


@repeatable
@given(samples, st.integers(-5, 5))
def test_adding_a_constant_changes_nothing(pairs: list[tuple[float, int]], offset: int) -> None:
    rewards, groups = columns([(round(r, 2), g) for r, g in pairs])
    shifted = group_advantages([r + offset for r in rewards], groups, eps=1e-2)
    np.testing.assert_allclose(shifted, group_advantages(rewards, groups, eps=1e-2), atol=1e-4)


@repeatable
@given(st.floats(-100, 100), st.integers(1, 9), st.booleans())
def test_equal_rewards_give_exactly_no_signal(reward: float, size: int, normalize_std: bool) -> None:
    assert not group_advantages([reward] * size, [7] * size, normalize_std=normalize_std).any()
    assert not leave_one_out([reward] * size, [7] * size).any()


def test_known_binary_group() -> None:
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], [3] * 4, normalize_std=False), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(group_advantages([1, 0, 0, 0], [3] * 4), [1.5, -0.5, -0.5, -0.5], atol=1e-4)
    np.testing.assert_allclose(leave_one_out([1, 0, 0, 0], [3] * 4), [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-6)


def test_refuses_what_has_no_advantage() -> None:
    with pytest.raises(ValueError, match="nan is not finite"):
        group_advantages([1.0, float("nan")], [0, 0])
    with pytest.raises(ValueError, match=r"shape \(2,\) and group_ids \(1,\)"):
        leave_one_out([1.0, 2.0], [0])
