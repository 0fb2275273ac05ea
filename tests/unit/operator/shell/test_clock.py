"""The API server's time, whatever the clock of the operator's node says."""

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_operator.clock import LATE_ANSWERS, TOLERANCE_S, ServerClock

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


class Node:
    """Its clock, which can be set, and seconds, which only pass."""

    def __init__(self) -> None:
        self.passed_s = 1000.0
        self.set_by_s = 0.0
        self.clock = ServerClock(wall=lambda: NOON + timedelta(seconds=self.passed_s + self.set_by_s), monotonic_s=lambda: self.passed_s)

    def answer(self, behind_s: float = 0.0, server_ahead_s: float = 0.0) -> None:
        """An answer of the server, read some seconds after it was written."""
        written = NOON + timedelta(seconds=self.passed_s + server_ahead_s - behind_s)
        self.clock.synchronize(format_datetime(written.replace(microsecond=0), usegmt=True))

    def off_s(self) -> float:
        return (self.clock.now() - NOON).total_seconds() - self.passed_s


def test_before_the_first_answer_it_is_the_time_of_the_node() -> None:
    node = Node()
    node.set_by_s = 77.0
    assert node.off_s() == 77.0


@given(jump_s=st.floats(-1e6, 1e6), steps_s=st.lists(st.floats(0, 100), max_size=20), lag_s=st.floats(0, 0.9))
def test_the_node_s_clock_can_be_set_without_effect(jump_s: float, steps_s: list[float], lag_s: float) -> None:
    node = Node()
    node.answer()
    for step_s in steps_s:
        node.set_by_s += jump_s
        node.passed_s += step_s
        assert abs(node.off_s()) <= TOLERANCE_S
        node.answer(lag_s)


def test_it_follows_the_server_forward_at_once_and_back_after_some_answers() -> None:
    node = Node()
    node.answer()
    node.answer(server_ahead_s=600)
    assert abs(node.off_s() - 600) <= TOLERANCE_S
    for _ in range(LATE_ANSWERS - 1):
        node.answer()
    assert abs(node.off_s() - 600) <= TOLERANCE_S, "they may have been read late"
    node.answer()
    assert abs(node.off_s()) <= TOLERANCE_S


def test_an_answer_that_is_read_late_changes_nothing() -> None:
    node = Node()
    for late_s in (0, 30, 0, 30):
        node.answer(late_s)
        assert abs(node.off_s()) <= TOLERANCE_S


@pytest.mark.parametrize("date", [None, "", "yesterday", "2026-11-26T12:00:00Z"])
def test_what_is_no_date_is_ignored(date: str | None) -> None:
    node = Node()
    node.clock.synchronize(date)
    assert node.off_s() == 0.0
