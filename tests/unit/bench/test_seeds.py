"""The bench of examples over seeds: what counts as learned, and its table."""

from __future__ import annotations

from typing import Any

import pytest

from bench.seeds import report


def run(example: str = "quickstart", seed: int = 0, *, first: float = 0.3, last: float = 0.9) -> dict[str, Any]:
    rewards = {"reward_first": {"mean": first}, "reward_last": {"mean": last}}
    return {"example": example, "seed": seed, "total_steps": 100, **rewards, "validation_mean": None, "training_s": 31.4}


@pytest.mark.parametrize(("first", "last", "learned"), [(0.35, 0.85, True), (0.36, 0.9, False), (0.3, 0.84, False)])
def test_learned_is_a_rise_between_two_rewards(first: float, last: float, *, learned: bool) -> None:
    assert report.has_learned(run(first=first, last=last)) is learned


def test_the_table_has_a_row_for_each_run_and_counts_those_that_learned() -> None:
    values = report.values([run(last=0.87), run(seed=1, last=0.91), run("rlvr-async", last=0.5) | {"validation_mean": 0.953}])
    assert values["headline"].startswith("2 of 3 runs rise from at most 0.35 to at least 0.85; last rewards: quickstart 0.870 to 0.910,")
    text = report.markdown({"machine": {"versions": {"ray": "2"}, "measured_at": "now", "cores": 2, "processor": "cpu"}, **values})
    assert "| quickstart | 1 | 100 | 0.300 | 0.910 | - | 31 s |" in text
    assert "| rlvr-async | 0 | 100 | 0.300 | 0.500 | 0.953 | 31 s |" in text
