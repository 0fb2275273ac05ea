"""The verdict of the soak: what is read from the kernel, the slope, what counts as flat."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench.soak import report
from bench.soak.memory import read, slope

ROLLUP = (
    "00400000-7fff ---p 00000000 00:00 0 [rollup]\nRss:  3000 kB\nPss:  2000 kB\nPss_Anon:  1500 kB\nPss_File:  400 kB\nPss_Shmem: 100 kB\n"
)


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text(ROLLUP)
    found = read(7, tmp_path)
    assert found is not None
    assert (found.rss_bytes, found.pss_bytes, found.held_bytes) == (3000 * 1024, 2000 * 1024, 1600 * 1024)
    assert read(8, tmp_path) is None
    assert read(os.getpid()) is not None


def test_the_slope_is_that_of_the_line_whatever_a_few_samples_say() -> None:
    seconds = [float(s) for s in range(40)]
    values = [5.0 + 0.5 * s for s in seconds]
    values[7], values[30] = 500.0, -500.0
    assert slope(seconds, values) == pytest.approx(0.5, abs=0.02)
    with pytest.raises(ValueError, match="two points, found 1"):
        slope([1.0], [1.0])


def parts(mib_per_hour: float) -> dict[str, dict[str, Any]]:
    """An hour that grows evenly, after a start that grows faster."""
    rows = [[60.0 * m, 500.0, 400.0, 300.0 + mib_per_hour * m / 60 - (50.0 if m < 10 else 0.0), m] for m in range(61)]
    return {"job": {"unit": "steps", "problem": "", "samples": {"driver": rows}}}


@pytest.mark.parametrize(("mib_per_hour", "flat"), [(0.0, True), (-30.0, True), (9.0, True), (11.0, False)])
def test_growth_is_judged_after_the_warm_up(mib_per_hour: float, flat: bool) -> None:
    (verdict,) = report.verdicts(parts(mib_per_hour))
    assert verdict["flat"] is flat
    assert verdict["growth_mib_per_hour"] == pytest.approx(mib_per_hour, abs=0.01)
    assert verdict["per_hour"] == 60
