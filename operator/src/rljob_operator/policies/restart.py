"""What follows a failed attempt: another one, after a while, or the end of the job."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from rljob_api.v1alpha1.operations import FailureAction
from rljob_operator import times
from rljob_operator.policies.failure import headline
from rljob_operator.policies.options import Options
from rljob_operator.policies.situation import MAX_ATTEMPT, Recorded

MAX_BACKOFF_S = 600
"""Longest wait before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether an attempt is followed by another, and why not."""

    is_restart: bool
    explanation: str = ""
    """For the message of the final failure; empty when there is nothing to add."""


def judge(options: Options, recorded: Recorded) -> Verdict:
    """Apply the failure policy: the first rule that names the reason, else whether the machine failed; then the restarts that are left."""
    failure = recorded.failure
    used = failure.attempt - 1
    default = FailureAction.RESTART if failure.reason.is_machine_failure else FailureAction.FAIL
    action = next((action for reason, action in options.rules if reason == failure.reason), default)
    if action is FailureAction.RESTART and used < options.max_restarts and failure.attempt < MAX_ATTEMPT:
        return Verdict(is_restart=True)
    if used == 0:
        return Verdict(is_restart=False)
    left = "" if action is FailureAction.RESTART else f" of {options.max_restarts}; {failure.reason} is not followed by another"
    return Verdict(is_restart=False, explanation=f"After {used} restart{'s' if used > 1 else ''}{left}.")


def backoff(options: Options, failed_attempt: int) -> timedelta:
    """Wait after the end of an attempt: doubles with each one, at most :data:`MAX_BACKOFF_S`."""
    doublings = min(failed_attempt - 1, 10)
    return timedelta(seconds=min(options.restart_backoff_s * 2**doublings, MAX_BACKOFF_S))


def story(options: Options, recorded: Recorded) -> str:
    """Why and when the next attempt follows, in a sentence."""
    failure = recorded.failure
    next_time = recorded.time + backoff(options, failure.attempt)
    return (
        f"Attempt {failure.attempt} failed: {failure.reason}: {headline(failure.message)} "
        f"Attempt {failure.attempt + 1} of at most {options.max_restarts + 1} starts at {times.text(next_time)}"
    )
