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
    """Apply the failure policy: the first rule for the reason, by default whether the machine failed; then the remaining restarts."""
    failure = recorded.failure
    used = failure.attempt - 1
    default = FailureAction.RESTART if failure.reason.is_machine_failure else FailureAction.FAIL
    action = next((action for reason, action in options.rules if reason == failure.reason), default)
    if action is FailureAction.RESTART and used < options.max_restarts and failure.attempt < MAX_ATTEMPT:
        return NextStep(is_restart=True)
    if used == 0:
        return NextStep(is_restart=False)
    if action is FailureAction.RESTART:
        return NextStep(is_restart=False, explanation=f"After {used} restart{'s' if used > 1 else ''}.")
    return NextStep(is_restart=False, explanation=f"After {used} of {options.max_restarts} restarts; {failure.reason} is not retried.")


def backoff(options: Options, failed_attempt: int) -> timedelta:
    """Wait after a failed attempt: doubles with each one, at most :data:`MAX_BACKOFF_S`."""
    doublings = min(failed_attempt - 1, 10)
    return timedelta(seconds=min(options.restart_backoff_s * 2**doublings, MAX_BACKOFF_S))


def summary(options: Options, recorded: RecordedFailure) -> str:
    """Why and when the next attempt starts, without a final period."""
    failure = recorded.failure
    next_time = recorded.time + backoff(options, failure.attempt)
    return (
        f"Attempt {failure.attempt} failed: {failure.reason}: {headline(failure.message)} "
        f"Attempt {failure.attempt + 1} of at most {options.max_restarts + 1} starts at {times.text(next_time)}"
    )
