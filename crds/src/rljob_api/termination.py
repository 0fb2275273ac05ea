"""The driver's termination message: one line of its log with the reason it ended, written by the runtime, read by the operator.

KubeRay deletes pods, but keeps the last 20,000 characters of the driver's log in the RayJob's ``status.message``; a line printed last
survives there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rljob_api.vocabulary import Reason

MARKER = "RLJOB-FAILURE "
MAX_MESSAGE = 3000
"""Characters of the message; longer ones are cut in the middle, where they tell least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFailure:
    """Why a driver ended."""

    reason: Reason
    message: str
    worker: str | None = None
    """Worker it happened in, for example actor_train-0."""


def encode(failure: DriverFailure) -> str:
    """The line, without a line break at its end; never longer than about four times :data:`MAX_MESSAGE`."""
    return MARKER + json.dumps({"reason": failure.reason, "message": shorten(failure.message, MAX_MESSAGE), "worker": failure.worker})


def decode(log: str) -> DriverFailure | None:
    """The failure that a log ends with, or None: the last line with the marker, wherever it stands; a broken one does not count."""
    for line in reversed(log.splitlines()):
        _, found, text = line.partition(MARKER)
        if not found:
            continue
        try:
            data = json.loads(text)
            return DriverFailure(reason=Reason(data["reason"]), message=str(data["message"]), worker=data.get("worker"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def shorten(text: str, limit: int) -> str:
    """``text`` with at most ``limit`` characters: start and end are kept, the end longer, because errors say most there."""
    if len(text) <= limit:
        return text
    gap = " ... "
    start = (limit - len(gap)) // 3
    return text[:start] + gap + text[len(text) - (limit - len(gap) - start) :]
