"""Which failures are followed by another attempt."""

from __future__ import annotations

import pytest

from rljob_api.vocabulary import Reason
from rljob_operator.model import Failure
from rljob_operator.policies import restart
from rljob_operator.policies.options import read
from rljob_operator.policies.situation import RecordedFailure
from tests.support.operator_scene import at, scene


def recorded(reason: Reason, attempt: int, disruptions: int = 0) -> RecordedFailure:
    return RecordedFailure(failure=Failure(attempt=attempt, reason=reason, message="m"), time=at(0), disruptions=disruptions)


def evaluate(reason: Reason, attempt: int, maximum: int, *rules: tuple[str, str], disruptions: int = 0) -> restart.NextStep:
    options = read(scene().restarts(maximum, rules=rules).job.spec)
    return restart.evaluate(options, recorded(reason, attempt, disruptions))


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


def test_disruptions_restart_without_restarts_left_and_use_none_up() -> None:
    assert evaluate(Reason.EVICTED, 1, 0, disruptions=1).is_restart
    assert evaluate(Reason.EVICTED, 98, 0, disruptions=98).is_restart
    assert not evaluate(Reason.EVICTED, 99, 0, disruptions=99).is_restart, "attempt numbers have two digits"
    assert [evaluate(Reason.WORKER_LOST, attempt, 2, disruptions=3).is_restart for attempt in (4, 5, 6)] == [True, True, False]
    assert evaluate(Reason.WORKER_LOST, 6, 2, disruptions=3).explanation == "After 2 restarts and 3 disruptions."
    explanation = evaluate(Reason.DATA_INVALID, 2, 2, disruptions=1).explanation
    assert explanation == "After 0 of 2 restarts and 1 disruption; DataInvalid is not retried."


def test_disruptions_have_a_limit_of_their_own_and_rules() -> None:
    options = read(scene().spec(failurePolicy={"maxDisruptions": 2}).job.spec)
    assert [restart.evaluate(options, recorded(Reason.EVICTED, n, n)).is_restart for n in (1, 2, 3)] == [True, True, False]
    assert restart.evaluate(options, recorded(Reason.EVICTED, 3, 3)).explanation == "After 2 of 2 disruptions."
    assert not evaluate(Reason.EVICTED, 1, 5, ("Evicted", "Fail"), disruptions=1).is_restart


def test_only_failures_make_the_backoff_longer() -> None:
    options = read(scene().restarts(9, backoff_s=10).job.spec)
    ends = [(Reason.WORKER_LOST, 1, 0), (Reason.EVICTED, 2, 1), (Reason.WORKER_LOST, 3, 1), (Reason.EVICTED, 4, 2)]
    assert [restart.backoff(options, recorded(*end)).total_seconds() for end in ends] == [10, 10, 20, 10]
