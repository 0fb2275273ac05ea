"""Two drivers must never write to one run folder: a driver starts only after the previous one is gone.

The previous RayJob must have ended or be gone, without exception. The wait for a head pod that lingers, for example on an unreachable
machine, is bounded: nobody knows when such a pod will end.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_operator import times
from rljob_operator.policies.situation import Situation

MAX_WAIT = timedelta(seconds=600)
"""Longest wait for a head pod, from the end of its attempt or from its own deletion deadline, whichever is later."""
PHASES_ENDED = ("Succeeded", "Failed")
"""Phases of a pod whose containers have all terminated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What the next driver waits for, and until when at most."""

    message: str
    until: datetime


def wait_for_heads(situation: Situation, since: datetime) -> Wait | None:
    """The head pod that may still run a driver; None if there is none or the wait for it has expired."""
    waits = []
    for pod in sorted(situation.observed.pods, key=lambda pod: pod.name):
        if pod.is_head and pod.phase not in PHASES_ENDED:
            until = max(since, pod.deletion_time or since) + MAX_WAIT
            if situation.now < until:
                waits.append((until, pod.name))
    if not waits:
        return None
    until, name = max(waits)
    return Wait(message=f"pod {name} of the previous driver is gone, or at {times.text(until)} at the latest", until=until)
