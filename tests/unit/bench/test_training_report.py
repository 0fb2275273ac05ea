"""The line that stands for what bench.training measured."""

from __future__ import annotations

from typing import Any

from bench.training.report import headline


def memory_row(estimated: int, measured: int) -> dict[str, Any]:
    return {"estimated": {"peak_bytes": estimated}, "measured": {"peak_bytes": measured}}


def test_the_headline_is_the_slowest_ratio_and_the_largest_errors() -> None:
    fast = {"tokens_per_cpu_s": {"RLJob": [20.0, 30.0, 40.0], "TRL": [10.0, 10.0, 10.0]}}
    slow = {"tokens_per_cpu_s": {"RLJob": [10.0, 11.0, 12.0], "TRL": [10.0, 10.0, 10.0]}}
    memory = {"rows": [memory_row(96, 100), memory_row(105, 100)]}
    reported = headline({"speed": {"rows": [fast, slow]}, "memory": memory})
    assert reported == "at least 1.10 times TRL's tokens per second, estimate of memory -4 to +5 % of the peaks of 2 trainers"
    assert headline({"memory": memory}) == "estimate of memory -4 to +5 % of the peaks of 2 trainers"
