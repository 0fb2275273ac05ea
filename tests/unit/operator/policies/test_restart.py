"""Which failures are followed by another attempt."""

from __future__ import annotations

import pytest

from rljob_api.vocabulary import Reason
from rljob_operator.model import Failure
from rljob_operator.policies import restart
from rljob_operator.policies.options import read
from rljob_operator.policies.situation import RecordedFailure
from tests.support.operator_scene import at, scene


def evaluate(reason: Reason, attempt: int, maximum: int, *rules: tuple[str, str]) -> restart.NextStep:
    options = read(scene().restarts(maximum, rules=rules).job.spec)
    return restart.evaluate(options, RecordedFailure(failure=Failure(attempt=attempt, reason=reason, message="m"), time=at(0)))


@pytest.mark.parametrize("reason", list(Reason))
def test_without_rules_only_the_machines_failures_restart(reason: Reason) -> None:
    assert evaluate(reason, 1, 1).is_restart == reason.is_machine_failure


def test_restarts_are_counted_by_attempts_beyond_the_first() -> None:
    assert [evaluate(Reason.WORKER_LOST, attempt, 2).is_restart for attempt in (1, 2, 3)] == [True, True, False]
    assert not evaluate(Reason.WORKER_LOST, 1, 0).is_restart
    assert not evaluate(Reason.WORKER_LOST, 99, 98).is_restart


def test_the_first_rule_that_names_the_reason_wins() -> None:
    rules = (("DataInvalid", "Fail"), ("WorkerLost", "Fail"), ("WorkerLost", "Restart"), ("ModelInvalid", "Restart"))
    assert not evaluate(Reason.WORKER_LOST, 1, 9, *rules).is_restart
    assert evaluate(Reason.MODEL_INVALID, 1, 9, *rules).is_restart
    assert evaluate(Reason.HEAD_LOST, 1, 9, *rules).is_restart


def test_the_explanation_counts_the_restarts() -> None:
    assert evaluate(Reason.WORKER_LOST, 1, 0).explanation == ""
    assert evaluate(Reason.WORKER_LOST, 2, 1).explanation == "After 1 restart."
    assert evaluate(Reason.DATA_INVALID, 3, 5).explanation == "After 2 of 5 restarts; DataInvalid is not retried."
