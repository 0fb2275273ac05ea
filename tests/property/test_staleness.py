"""BOUND: no group is started further ahead of training than declared, for any order of events."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.overlap.staleness import StalenessGate

EVENTS = st.lists(st.sampled_from(["admit", "admit_one", "drop", "train"]), max_size=200)


@given(batch=st.integers(1, 8), lag=st.sampled_from([0.0, 0.5, 1.0, 2.0, 2.5]), steps=st.integers(1, 12), events=EVENTS)
def test_no_group_starts_more_than_lag_versions_before_it_is_trained(batch: int, lag: float, steps: int, events: list[str]) -> None:
    gate = StalenessGate(groups_per_step=batch, max_lag=lag, total_groups=steps * batch)
    started_at: list[int] = []
    trained = 0
    for event in events:
        if event.startswith("admit"):
            count = gate.capacity if event == "admit" else min(gate.capacity, 1)
            gate.admit(count)
            started_at += [gate.version] * count
        elif event == "drop" and len(started_at) > trained:
            started_at.pop()
            gate.drop()
        elif event == "train" and len(started_at) - trained >= batch:
            for version in started_at[trained : trained + batch]:  # oldest first
                assert gate.version - version <= math.ceil(lag)
            trained += batch
            gate.advance(gate.version + 1)
        assert len(started_at) <= steps * batch
        assert len(started_at) <= (lag + gate.version + 1) * batch


@given(batch=st.integers(1, 64), steps=st.integers(1, 100))
def test_lag_zero_admits_exactly_one_batch_per_version(batch: int, steps: int) -> None:
    gate = StalenessGate(groups_per_step=batch, max_lag=0, total_groups=steps * batch)
    for version in range(1, steps + 1):
        assert gate.capacity == batch
        gate.admit(batch)
        assert gate.capacity == 0
        gate.advance(version)
    assert gate.capacity == 0


def test_a_resumed_gate_stands_where_the_first_one_stood() -> None:
    gate = StalenessGate(groups_per_step=4, max_lag=0, total_groups=40, version=7)
    assert gate.capacity == 4


def test_admitting_too_much_and_going_back_are_refused() -> None:
    gate = StalenessGate(groups_per_step=4, max_lag=0, total_groups=40, version=2)
    with pytest.raises(ValueError, match="5 groups admitted, only 4 allowed at version 2"):
        gate.admit(5)
    with pytest.raises(ValueError, match="2 -> 2"):
        gate.advance(2)
