"""A judge is never asked faster, or for more, than its limits say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.rewards.judging.config import Budget
from rljob_runtime.rewards.judging.limits import BudgetSpentError, Pace, Spending

ARRIVALS = st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 50)), min_size=1, max_size=40)


@given(arrivals=ARRIVALS, per_minute=st.floats(1.0, 6000.0))
def test_no_minute_has_more_units_than_allowed(arrivals: list[tuple[float, int]], per_minute: float) -> None:
    """Besides the last reservation in it, which may be larger than a minute's share."""
    pace, now_s, begun = Pace(per_minute), 0.0, []
    for gap_s, units in arrivals:
        now_s += gap_s
        begun.append((now_s + pace.reserve(units, now_s), units))
    assert [time_s for time_s, _ in begun] == sorted(time_s for time_s, _ in begun)
    for first, (start_s, _) in enumerate(begun):
        inside = [units for time_s, units in begun[first:] if time_s < start_s + 60.0]
        assert sum(inside[:-1]) <= per_minute * (1 + 1e-6)


def test_a_reservation_that_was_too_large_is_given_back() -> None:
    pace = Pace(60.0)
    assert pace.reserve(10, 0.0) == 0.0
    pace.correct(-7)
    assert pace.reserve(1, 0.0) == pytest.approx(3.0)
    assert pace.reserve(1, 100.0) == 0.0


def test_a_budget_ends_with_what_was_spent() -> None:
    spending = Spending(budget=Budget(calls=2))
    spending.take_call()
    spending.take_call()
    with pytest.raises(BudgetSpentError, match="budget of 2 calls"):
        spending.take_call()
    spending.give_call_back()  # not sent
    spending.take_call()
    with pytest.raises(BudgetSpentError, match="budget of 2 calls"):
        spending.take_call()
    spending = Spending(budget=Budget(tokens=10))
    spending.take_call()
    spending.tokens += 12
    with pytest.raises(BudgetSpentError, match="budget of 10 tokens of this reward process is spent: 12 were used"):
        spending.take_call()
