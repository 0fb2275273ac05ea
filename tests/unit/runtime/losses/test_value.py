"""The value loss against a few lines of plain Python, its gradient against what the clip promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.losses.value import clipped_value_loss
from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.training.critic_config import CriticConfig

numbers = st.floats(-8.0, 8.0, width=32)
tokens = st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=6)


def plain(value: float, old: float, goal: float, clip: float | None) -> float:
    bounded = value if clip is None else min(max(value, old - clip), old + clip)
    return 0.5 * max((value - goal) ** 2, (bounded - goal) ** 2)


@given(tokens=tokens, clip=st.none() | st.floats(0.01, 4.0))
def test_the_loss_is_the_larger_of_two_squared_errors(tokens, clip):
    terms = clipped_value_loss(*(torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)), value_clip=clip)
    expected = [plain(*token, clip) for token in tokens]
    assert terms.loss.tolist() == pytest.approx(expected, abs=1e-12)
    assert terms.clipped.tolist() == [e > plain(*t, None) for t, e in zip(tokens, expected, strict=True)]


@given(value=numbers, old=numbers, goal=numbers, clip=st.none() | st.floats(0.01, 4.0))
def test_the_gradient_is_the_error_or_nothing(value, old, goal, clip):
    values = torch.tensor([value], requires_grad=True)
    terms = clipped_value_loss(values, torch.tensor([old]), torch.tensor([goal]), value_clip=clip)
    terms.loss.sum().backward()
    assert values.grad is not None
    error = float(values.detach() - torch.tensor([goal]))
    if terms.clipped.item():
        assert clip is not None
        assert abs(value - old) > clip - 1e-6, "only a value that moved is clipped"
        assert values.grad.item() == 0.0
    elif clip is None or abs(value - old) < clip - 1e-6:
        assert values.grad.item() == error
    else:
        assert values.grad.item() in (error, 0.5 * error), "a tie of both sides shares the gradient"


def test_a_value_that_moved_away_from_its_return_is_pulled_back():
    values = torch.tensor([2.0, 2.0], requires_grad=True)
    terms = clipped_value_loss(values, torch.zeros(2), torch.tensor([-3.0, 3.0]), value_clip=0.5)
    terms.loss.sum().backward()
    assert terms.clipped.tolist() == [False, True]
    assert values.grad is not None
    assert values.grad.tolist() == [5.0, 0.0]
    assert terms.loss.tolist() == [12.5, 3.125]


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_clip_without_meaning_is_refused(clip):
    with pytest.raises(ValueError, match=r"value_clip is .*; it must be above 0, or None"):
        ValueLossConfig(value_clip=clip)


def test_a_critic_is_checked_as_a_policy_is_and_learns():
    with pytest.raises(ValueError, match="token_budget is 0"):
        CriticConfig(model_path="m", token_budget=0)
    with pytest.raises(ValueError, match="trainable is False; a critic"):
        CriticConfig(model_path="m", trainable=False)
