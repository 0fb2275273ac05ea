"""Metrics of judges are sums over judgements, all registered."""

from __future__ import annotations

from rljob_runtime.overlap.judge_counts import JudgeCounts
from rljob_runtime.records import Judgement
from rljob_runtime.report.names import require_registered


def test_sums_by_reward() -> None:
    counts = JudgeCounts()
    assert counts.metrics() == {}
    counts.add(
        [
            Judgement(reward="a", text="x", calls=3, prompt_tokens=10, completion_tokens=2, elapsed_s=4.0),
            Judgement(reward="a", text="x"),
            Judgement(reward="a", error="late", calls=5, elapsed_s=2.0),
        ]
    )
    counts.add([Judgement(reward="b", text="y", calls=1)])
    metrics = counts.metrics()
    require_registered(metrics)
    assert {name.removesuffix("/a"): value for name, value in metrics.items() if name.endswith("/a")} == {
        "judge/questions": 3.0,
        "judge/calls": 8.0,
        "judge/failures": 1.0,
        "judge/remembered": 1.0,
        "judge/prompt_tokens": 10.0,
        "judge/completion_tokens": 2.0,
        "judge/answer_mean_s": 2.0,
    }
    assert metrics["judge/calls/b"] == 1.0
