"""Whether an attempt, and with it the job, has succeeded."""

from __future__ import annotations

from rljob_operator.policies.situation import Situation


def succeeded(situation: Situation) -> bool:
    """Whether the driver of the current attempt completed all steps; this overrides a failure recorded for the attempt earlier."""
    child = situation.child
    return child is not None and child.deployment_status == "Complete" and child.job_status == "SUCCEEDED"
