"""Kueue, the real one: quota, preemption and suspension of jobs that it admits. No step is lost, and operator and Kueue do not fight."""

from __future__ import annotations

from concurrent.futures import Future

from e2e.queues import Outcome

ENDS_S = 1200.0


def test_quota_preemption_and_suspension_cost_no_step(scenario_of_queues: Future[Outcome]) -> None:
    """:func:`e2e.queues.preempted_and_suspended` has run in a namespace of its own beside earlier scenarios, as it mostly waits."""
    outcome = scenario_of_queues.result(ENDS_S)
    assert outcome.status["attempt"] == 1, "neither was a failure"
    assert outcome.steps
    assert outcome.steps == list(range(1, len(outcome.steps) + 1)), "every step was trained once"
