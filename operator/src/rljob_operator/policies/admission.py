"""Whether the job is ours to run, and whether its spec was accepted."""

from __future__ import annotations

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1.conditions import ConditionStatus
from rljob_api.vocabulary import Reason
from rljob_operator.model import ConditionValue, Failure, JobView
from rljob_operator.policies import options
from rljob_operator.policies.situation import Situation

CONTROLLER = "rljob.dev/operator"
"""Value of spec.managedBy that means this operator, as does none."""
MAX_MESSAGE = 4096
"""Characters of a condition's message."""


def is_managed(job: JobView) -> bool:
    """Whether this operator is to look after the job; another controller does when spec.managedBy names one."""
    return options.read(job.spec).managed_by in (None, CONTROLLER)


def accepted(situation: Situation, failure: Failure | None = None) -> ConditionValue:
    """The condition Accepted; ``failure`` is how the current attempt ended, when it did."""
    checked = situation.observed.checked
    if isinstance(checked, SpecInvalidError):
        message = problems_text([str(error) for error in checked.errors])
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.SPEC_INVALID, message=message)
    refused = situation.observed.rejected
    if refused is None and failure is not None and failure.reason is Reason.CHILD_REJECTED:
        refused = failure.message
    if refused is not None:
        return ConditionValue(status=ConditionStatus.FALSE, reason=Reason.CHILD_REJECTED, message=refused[:MAX_MESSAGE])
    return ConditionValue(status=ConditionStatus.TRUE, reason=Reason.SPEC_VALID)


def problems_text(problems: list[str], limit: int = MAX_MESSAGE) -> str:
    """One problem per line in at most ``limit`` characters; the last line says how many were left out."""
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
