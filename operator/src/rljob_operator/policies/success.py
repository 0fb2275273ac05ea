"""When an attempt, and with it the job, has succeeded."""

from __future__ import annotations

from rljob_operator.policies.situation import Situation


def succeeded(situation: Situation) -> bool:
    """Whether the driver of the current attempt did all steps. It counts even if a failure of the attempt was recorded before."""
    child = situation.child
    return child is not None and child.deployment_status == "Complete" and child.job_status == "SUCCEEDED"
