"""What the validating webhook answers: an AdmissionReview with the problems of condition Accepted, before the RLJob is stored. Pure.

=========================================  ==========================================================================
request                                    answer
=========================================  ==========================================================================
a new RLJob                                refused with every problem of its spec
a change of the spec                       refused with the problems at paths where the stored spec has none
the spec stays, or the object is deleted   allowed: metadata can always be edited, also of a spec an upgrade made invalid
``managedBy`` another controller           allowed with a warning, not checked: its controller may know more
=========================================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rljob_api import validation
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.v1alpha1.rljob import API_VERSION, KIND
from rljob_operator import views
from rljob_operator.policies import admission

NO_STORAGE: Final = "spec.storage is not set: checkpoints and the trained model are lost with the pods"
UNMANAGED: Final = "spec.managedBy names another controller: this operator neither checks nor runs the job"
NAME_TO_COME: Final = "to-be-generated"
"""Stands for the name that the API server will make of generateName."""


Known = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""A spec without fields that this operator does not know; see :meth:`rljob_operator.skew.Skew.known`."""


def everything(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """All of it: where the CRD has the operator's own fields."""
    return spec


def review(request: Mapping[str, Any], known: Known = everything) -> dict[str, Any]:
    """Answer the ``request`` of an AdmissionReview with its ``response``.

    Raises:
        KeyError, TypeError, AttributeError: it is not a request about an RLJob.
    """
    new, old = request["object"], request.get("oldObject") or {}
    allowed: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    if new["metadata"].get("deletionTimestamp") or (old and new.get("spec") == old.get("spec")):
        return allowed
    if not admission.is_managed(views.job_view(new)):
        return {**allowed, "warnings": [UNMANAGED]}
    problems, unchecked = _checked(new, known)
    if problems and old:
        # By path: the numbers in a text may follow from other fields.
        stored = {problem.path for problem in _checked(old, known)[0]}
        problems = [problem for problem in problems if problem.path not in stored]
    if problems:
        status = {"code": 422, "reason": "Invalid", "message": admission.problems_text([str(problem) for problem in problems], unchecked)}
        return {**allowed, "allowed": False, "status": status}
    return allowed if old or new["spec"].get("storage") else {**allowed, "warnings": [NO_STORAGE]}


def problems_of(job: Mapping[str, Any], known: Known = everything) -> list[str]:
    """The problems of an RLJob as the operator words them in condition Accepted."""
    return [str(problem) for problem in _checked(job, known)[0]]


def _checked(job: Mapping[str, Any], known: Known) -> tuple[Sequence[FieldError], str | None]:
    """The problems of an RLJob, and what was not checked because of them."""
    metadata = job["metadata"]
    name = metadata.get("name") or f"{metadata.get('generateName', '')}{NAME_TO_COME}"
    named = {"name": name, "namespace": metadata.get("namespace") or "default"}
    try:
        validation.check({"apiVersion": API_VERSION, "kind": KIND, "metadata": named, "spec": known(job.get("spec") or {})})
    except SpecInvalidError as error:
        return error.errors, error.unchecked
    return (), None
