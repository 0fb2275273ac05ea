"""Two drivers must not write one run folder: a driver starts only when the one before it is gone.

The RayJob before it must have ended or be gone, without exception. A head pod that stays behind, for example on a machine that is cut
off, is waited for only so long: nobody can tell when such a pod goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from rljob_operator import times
from rljob_operator.policies.situation import Situation

MAX_WAIT = timedelta(seconds=600)
"""How long a head pod is waited for, from the end of its attempt or from when it was to be gone, whichever is later."""
PHASES_ENDED = ("Succeeded", "Failed")
"""Phases of a pod whose containers have all ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """What the next driver waits for, and until when at the latest."""

    message: str
    until: datetime


def wait_for_heads(situation: Situation, since: datetime) -> Wait | None:
    """The head pod of the job that may still run a driver, None when there is none or the wait for it is over."""
    waits = []
    for pod in sorted(situation.observed.pods, key=lambda pod: pod.name):
        if pod.is_head and pod.phase not in PHASES_ENDED:
            until = max(since, pod.deletion_time or since) + MAX_WAIT
            if situation.now < until:
                waits.append((until, pod.name))
    if not waits:
        return None
    until, name = max(waits)
    return Wait(message=f"pod {name} of the driver before it is gone, or at {times.text(until)} at the latest", until=until)
