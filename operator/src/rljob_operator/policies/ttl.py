"""ttlSecondsAfterFinished: when a finished job deletes itself."""

from __future__ import annotations

from datetime import datetime, timedelta

from rljob_operator.policies.situation import Situation


def expires(situation: Situation) -> datetime | None:
    """When a job that is finished is to be deleted; None: never."""
    if situation.options.ttl_s is None:
        return None
    return (situation.completion_time or situation.now) + timedelta(seconds=situation.options.ttl_s)
