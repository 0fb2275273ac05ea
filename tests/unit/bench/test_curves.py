"""The bench of learning curves: its bands and their overlap on curves worked out by hand, its report."""

from __future__ import annotations

import pytest

from bench.curves import report
from bench.curves.bands import WINDOW_STEPS, bands, summarize


def curve(*levels: float) -> list[float]:
    """A curve with one level a window; noise of mean 0 within it."""
    return [level + (0.01 if step % 2 else -0.01) for level in levels for step in range(WINDOW_STEPS)]


def test_bands_are_mean_and_range_over_seeds_by_window():
    found = bands({"0": curve(0.1, 0.5), "1": [*curve(0.3, 0.9), 9.0]})  # the last step fills no window
    assert found["mean"] == pytest.approx([0.2, 0.7])
    assert found["low"] == pytest.approx([0.1, 0.5])
    assert found["high"] == pytest.approx([0.3, 0.9])


@pytest.mark.parametrize(
    ("other", "share"),
    [
        ({"0": curve(0.1, 0.5, 0.6, 0.7), "1": curve(0.2, 0.6, 0.7, 0.8)}, 1.0),
        ({"0": curve(0.15, 0.7, 0.8, 0.9), "1": curve(0.3, 0.7, 0.9, 0.95)}, 0.25),
        ({"0": curve(0.3, 0.7, 0.8, 0.9), "1": curve(0.4, 0.8, 0.9, 1.0)}, 0.0),
    ],
)
def test_overlap_is_the_share_of_windows_whose_ranges_touch(other, share):
    one = {"0": curve(0.1, 0.5, 0.6, 0.7), "1": curve(0.2, 0.6, 0.7, 0.8)}
    assert summarize({"RLJob": one, "TRL": other})["overlap_share"] == pytest.approx(share)


def test_distance_of_the_ends_is_in_standard_errors():
    one, other = {"0": curve(0.5, 0.5, 0.5), "1": curve(0.7, 0.7, 0.7)}, {"0": curve(0.2, 0.2, 0.2), "1": curve(0.4, 0.4, 0.4)}
    found = summarize({"RLJob": one, "TRL": other})
    assert found["ends"] == {"RLJob": pytest.approx([0.5, 0.7]), "TRL": pytest.approx([0.2, 0.4])}
    assert found["ends_apart_errors"] == pytest.approx(0.3 / (0.01 + 0.01) ** 0.5)  # the variance of each mean is 0.02 / 2


def test_report_shows_bands_and_draws_them(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    runs = {"0": curve(0.1, 0.5), "1": curve(0.2, 0.6)}
    machine = {"measured_at": "now", "versions": {"trl": "1"}}
    values = {"machine": machine, "steps": 20, "curves": {}, **summarize({"RLJob": runs, "TRL": runs})}
    text = report.markdown(values)
    assert "overlap in 100 % of" in text
    assert "| 11 to 20 | 0.550 (0.500 to 0.600) | 0.550 (0.500 to 0.600) |" in text
    report.draw(values)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
