"""Whether this operator manages the job, and whether its spec is accepted."""

from __future__ import annotations

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1.conditions import ConditionStatus
from rljob_api.vocabulary import Reason
from rljob_operator.model import ConditionValue, Failure, JobView
from rljob_operator.policies import options
from rljob_operator.policies.situation import Situation

CONTROLLER = "rljob.dev/operator"
"""Value of spec.managedBy for this operator; an unset field means the same."""
MAX_MESSAGE = 4096
"""Maximum length of a condition message, in characters."""
TOLERATED = "The job has started and continues. This version of the operator refuses new jobs with such a spec:"


def is_managed(job: JobView) -> bool:
    """Whether this operator manages the job: spec.managedBy names no other controller."""
    return options.read(job.spec).managed_by in (None, CONTROLLER)


def accepted(situation: Situation, failure: Failure | None = None) -> ConditionValue:
    """Condition Accepted; ``failure`` is that of the current attempt, if it failed."""
    checked = situation.observed.checked
    if isinstance(checked, SpecInvalidError):
        message = problems_text([str(error) for error in checked.errors], checked.unchecked)
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.SPEC_INVALID, message=message)
    if situation.changed_fields:
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.SPEC_CHANGED, message=changed_text(situation))
    rejected = situation.observed.rejected
    if rejected is None and failure is not None and failure.reason is Reason.CHILD_REJECTED:
        rejected = failure.message
    if rejected is not None:
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.CHILD_REJECTED, message=rejected[:MAX_MESSAGE])
    tolerated = [str(error) for error in checked.tolerated]
    message = f"{TOLERATED}\n{problems_text(tolerated, limit=MAX_MESSAGE - len(TOLERATED) - 1)}" if tolerated else ""
    return ConditionValue(status=ConditionStatus.TRUE, reason=Reason.SPEC_VALID, message=message)


def changed_text(situation: Situation) -> str:
    """What changed that cannot, and what follows."""
    names = ", ".join(f"spec.{name}" for name in situation.changed_fields)
    return (
        f"{names} cannot be changed. Attempt {situation.attempt} goes on with what it began with, and no other attempt is made: "
        "change it back, or make a new RLJob."
    )


def problems_text(problems: list[str], unchecked: str | None = None, limit: int = MAX_MESSAGE) -> str:
    """One problem per line in at most ``limit`` characters; a line counts those left out, the last one says what was not checked."""
    if unchecked is not None:
        return f"{problems_text(problems, limit=limit - len(unchecked) - 1)}\n{unchecked}"
    text = "\n".join(problems)
    if len(text) <= limit:
        return text
    room = limit - len(f"\n... and {len(problems)} more problems")
    kept: list[str] = []
    for problem in problems:
        if len("\n".join([*kept, problem])) > room:
            break
        kept.append(problem)
    if not kept:
        kept = [problems[0][: room - 3] + "..."]
    left_out = len(problems) - len(kept)
    return "\n".join([*kept, f"... and {left_out} more problem{'s' if left_out > 1 else ''}"] if left_out else kept)
