"""Kueue, the real one: quota, preemption and suspension of jobs that it admits. No step is lost, and operator and Kueue do not fight."""

from __future__ import annotations

from concurrent.futures import Future

ENDS_S = 1200.0


def test_quota_preemption_and_suspension_cost_no_step(scenario_of_queues: Future[None]) -> None:
    """:func:`e2e.queues.lose_no_step`, which has run in a namespace of its own beside earlier scenarios, as it mostly waits."""
    scenario_of_queues.result(ENDS_S)
