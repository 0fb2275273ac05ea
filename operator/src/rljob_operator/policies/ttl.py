"""ttlSecondsAfterFinished: when a finished job is deleted."""

from __future__ import annotations

from datetime import datetime, timedelta

from rljob_operator.policies.situation import Situation


def expires(situation: Situation) -> datetime | None:
    """When a finished job expires; None: never."""
    if situation.options.ttl_s is None:
        return None
    return (situation.completion_time or situation.now) + timedelta(seconds=situation.options.ttl_s)
