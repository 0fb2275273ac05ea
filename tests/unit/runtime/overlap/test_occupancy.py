"""Slots in use over time."""

import pytest

from rljob_runtime.overlap.occupancy import BusySpans, Occupancy


def test_the_share_is_the_integral_of_used_slots_over_the_time_since_the_last_question():
    engine = Occupancy(slots=4)
    engine.take(10.0)
    engine.change(2, 11.0)  # 1 s empty
    engine.change(7, 13.0)  # 2 s half full
    engine.change(1, 14.0)  # 1 s full: what waits at the engine uses no slot
    assert engine.take(16.0) == pytest.approx((0 + 2 * 2 + 4 * 1 + 1 * 2) / (4 * 6))
    assert engine.take(18.0) == pytest.approx(0.25)


@pytest.mark.parametrize("second", [0.001, 1.0, 1000.0])
def test_the_share_does_not_depend_on_the_unit_of_time(second: float):
    engine = Occupancy(slots=4)
    engine.take(0.0)
    engine.change(1, 0.25 * second)
    assert engine.take(1.0 * second) == pytest.approx(0.75 / 4)


def test_no_time_is_no_use():
    engine = Occupancy(slots=1)
    engine.change(1, 5.0)
    engine.take(5.0)
    assert engine.take(5.0) == 0.0


def test_work_is_from_its_beginning_to_its_end_and_cut_where_somebody_asks():
    spans = BusySpans()
    assert spans.take(1.0) == []
    for is_busy, time_s in ((True, 2.0), (True, 2.5), (False, 3.0), (False, 3.5), (True, 4.0)):
        spans.change(is_busy, time_s)
    assert spans.take(5.0) == [(2.0, 3.0), (4.0, 5.0)]
    spans.change(False, 6.0)
    assert spans.take(7.0) == [(5.0, 6.0)]
    assert spans.take(8.0) == []
