"""Returns over tokens and steps: a worked example each, and what they refuse. Their laws are in tests/property."""

import numpy as np
import pytest

from rljob_runtime.losses.returns import discounted_sums, gae, gigpo_advantages, step_returns


def test_discounted_sums_stay_inside_their_response() -> None:
    assert discounted_sums([1, 2, 4, 8, 16], [3, 0, 2], 0.5).tolist() == [3, 4, 4, 16, 16]
    assert discounted_sums([], [0, 0], 0.5).tolist() == []


def test_gae_ends_with_the_response_and_not_with_the_next_ones_value() -> None:
    advantages, returns = gae([0, 1, 2], [0.5, 0.25, 100], [2, 1], gamma=1.0, lambda_=1.0)
    assert advantages.tolist() == [0.5, 0.75, -98]
    assert returns.tolist() == [1, 1, 2]


def test_step_returns_of_trajectories_that_took_turns() -> None:
    assert step_returns([1, 10, 1, 10, 1], [0, 1, 0, 1, 0], 0.5).tolist() == [1.75, 15, 1.5, 10, 1]


def test_gigpo_compares_steps_from_the_same_state_of_the_same_group() -> None:
    """Two trajectories of one task both pass the door; only one opens it. Another task has a door too, which does not count."""
    result = gigpo_advantages(
        [0, 1, 0, 0, 4],
        trajectory_ids=[0, 0, 1, 1, 2],
        group_ids=[7, 7, 7, 7, 8],
        anchor_states=["hall", "door", "hall", "door", "door"],
        gamma=0.5,
        turn_weight=2.0,
        normalize_std=False,
    )
    np.testing.assert_allclose(result, [0.5 + 2 * 0.25, 0.5 + 2 * 0.5, -0.5 - 2 * 0.25, -0.5 - 2 * 0.5, 0.0])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\) but the lengths sum to 3"):
        discounted_sums([1, 2], [3], 1.0)
    with pytest.raises(ValueError, match=r"values have shape \(1,\) and rewards \(2,\)"):
        gae([1, 2], [1], [2], gamma=1.0, lambda_=1.0)
    with pytest.raises(ValueError, match=r"rewards have shape \(2,\) and trajectory_ids \(1,\)"):
        step_returns([1, 2], [0], 1.0)
    with pytest.raises(ValueError, match=r"anchor_states \(1,\)"):
        gigpo_advantages([1, 2], [0, 0], [0, 0], ["a"])
