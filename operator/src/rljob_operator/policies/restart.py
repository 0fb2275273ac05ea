"""What follows a failed attempt: another one after a backoff, or the failure of the job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from rljob_api.v1alpha1.operations import FailureAction
from rljob_operator import times
from rljob_operator.policies.failure import headline
from rljob_operator.policies.options import Options
from rljob_operator.policies.situation import MAX_ATTEMPT, RecordedFailure

MAX_BACKOFF_S = 600
"""Longest wait before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextStep:
    """Whether another attempt follows, and if not, why."""

    is_restart: bool
    explanation: str = ""
    """Added to the message of the final failure; may be empty."""


def evaluate(options: Options, recorded: RecordedFailure) -> NextStep:
    """Apply the failure policy: the first rule for the reason, by default whether the machine failed; then what is left of the budget.

    Disruptions have a budget of their own, because they say nothing about the job.
    """
    failure = recorded.failure
    default = FailureAction.RESTART if failure.reason.is_machine_failure else FailureAction.FAIL
    action = next((action for reason, action in options.rules if reason == failure.reason), default)
    if failure.reason.is_disruption:
        is_left = recorded.disruptions <= options.max_disruptions
    else:
        is_left = _failures(recorded) <= options.max_restarts
    if action is FailureAction.RESTART and is_left and failure.attempt < MAX_ATTEMPT:
        return NextStep(is_restart=True)
    return NextStep(is_restart=False, explanation=_explanation(options, recorded, is_retried=action is FailureAction.RESTART))


def _failures(recorded: RecordedFailure) -> int:
    """Attempts that failed for other reasons than disruptions, this one included."""
    return recorded.failure.attempt - recorded.disruptions


def _explanation(options: Options, recorded: RecordedFailure, *, is_retried: bool) -> str:
    failure = recorded.failure
    if failure.attempt == 1:
        return ""
    if failure.reason.is_disruption:
        return f"After {recorded.disruptions - 1} of {options.max_disruptions} disruptions."
    used = _failures(recorded) - 1
    disruptions = f" and {_counted(recorded.disruptions, 'disruption')}" if recorded.disruptions else ""
    if is_retried:
        return f"After {_counted(used, 'restart')}{disruptions}."
    return f"After {used} of {options.max_restarts} restarts{disruptions}; {failure.reason} is not retried."


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def backoff(options: Options, recorded: RecordedFailure) -> timedelta:
    """Wait after a failed attempt: doubles with each failure, at most :data:`MAX_BACKOFF_S`; a disruption does not count."""
    doublings = 0 if recorded.failure.reason.is_disruption else min(_failures(recorded) - 1, 10)
    return timedelta(seconds=min(options.restart_backoff_s * 2**doublings, MAX_BACKOFF_S))


def summary(options: Options, recorded: RecordedFailure) -> str:
    """Why and when the next attempt starts, without a final period."""
    failure = recorded.failure
    next_time = times.text(recorded.time + backoff(options, recorded))
    failed = f"Attempt {failure.attempt} failed: {failure.reason}: {headline(failure.message)} Attempt {failure.attempt + 1}"
    if failure.reason.is_disruption:
        return f"{failed}, which does not count as a restart, starts at {next_time}"
    return f"{failed} of at most {options.max_restarts + 1 + recorded.disruptions} starts at {next_time}"
