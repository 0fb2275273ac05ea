"""activeDeadlineSeconds: how long a job may hold devices, across all attempts since it last resumed."""

from __future__ import annotations

from datetime import datetime, timedelta

from rljob_api import termination
from rljob_api.vocabulary import Reason
from rljob_operator import times
from rljob_operator.model import Failure
from rljob_operator.policies.failure import MAX_MESSAGE
from rljob_operator.policies.situation import Situation


def deadline(situation: Situation) -> datetime | None:
    """When the job must have finished; None without a limit, before it started and while it is held."""
    limit_s, start = situation.options.active_deadline_s, situation.start_time
    if limit_s is None or start is None or situation.is_held:
        return None
    return start + timedelta(seconds=limit_s)


def overdue(situation: Situation) -> Failure | None:
    """The failure of a job that exceeded its deadline."""
    until = deadline(situation)
    if until is None or situation.now < until or situation.attempt is None or situation.start_time is None:
        return None
    limit_s = situation.options.active_deadline_s
    message = f"Not finished within activeDeadlineSeconds ({limit_s} s) since {times.text(situation.start_time)}."
    last = situation.last_failure
    if last is not None:
        message += f" Attempt {last.failure.attempt} failed earlier: {last.failure.reason}: {last.failure.message}"
    return Failure(attempt=situation.attempt, reason=Reason.ACTIVE_DEADLINE_EXCEEDED, message=termination.shorten(message, MAX_MESSAGE))
