"""What API server, planner and operator say to one manifest, and what of it must never be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from bench.operator.api import RLJOBS, Api
from rljob_api import paths, validation
from rljob_api.crd import schema
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.reading import manifest
from rljob_api.v1alpha1.conditions import ConditionStatus, ConditionType
from rljob_operator import desired, review, views
from rljob_operator.decide import decide
from rljob_operator.model import Observed
from rljob_operator.policies import admission
from rljob_operator.protocol import Kind
from rljob_operator.settings import Settings

SETTINGS: Final = Settings(runtime_image="example.com/rljob-runtime:fuzz", runtime_ray_version="2.60.0")
NOW: Final = datetime(2026, 1, 1, tzinfo=UTC)
DRY: Final = "?dryRun=All&fieldValidation=Strict"
_NAMES_A_PATH: Final = re.compile(r"\b(spec|metadata)\b|unknown field|<nil>: Invalid value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Outcome, and the findings: empty where all is as it should be."""

    outcome: str
    """accepted, refused by the schema, or refused by the planner."""
    findings: tuple[str, ...] = ()


async def examine(api: Api, namespace: str, document: Mapping[str, Any]) -> Verdict:
    """Ask the API server, the webhook's review, the operator's decision, and the API server again for the children; stores nothing."""
    status, answer = await api.answer("POST", RLJOBS.format(namespace=namespace) + DRY, document)
    refused = _problems(document)
    if status >= 300:
        message = str(answer.get("message"))
        found = [] if status in (400, 422) else [f"the API server answers {status}: {message[:300]}"]
        if not _NAMES_A_PATH.search(message):
            found.append(f"the schema's refusal names no path: {message[:300]}")
        if not refused:
            found.append(f"the schema refuses what the planner accepts: {message[:600]}")
        return Verdict(outcome="refused by the schema", findings=tuple(found))
    job = views.job_view(answer)
    try:
        checked: validation.CheckedJob | SpecInvalidError = validation.check(_stored(answer))
    except SpecInvalidError as error:
        checked = error
    observed = Observed(
        job=replace(job, uid="u1"), checked=checked, children=(), clusters=(), pods=(),
        runtime_image=SETTINGS.runtime_image, runtime_ray_version=SETTINGS.runtime_ray_version,
    )  # fmt: skip
    decision = decide(observed, NOW)
    accepted = decision.conditions.get(ConditionType.ACCEPTED) if admission.is_managed(job) else None
    if isinstance(checked, SpecInvalidError):
        return Verdict(outcome="refused by the planner", findings=tuple(_bad_findings(answer, checked, decision, accepted)))
    found = [f"with the server's defaults it is valid, without them not: {problem}" for problem in _problems(_as_json(document))[:1]]
    if accepted is not None and accepted.status is not ConditionStatus.TRUE:
        found.append(f"valid, but Accepted={accepted.status}")
    if review.review({"uid": "u", "object": answer})["allowed"] is not True:
        found.append("the webhook would refuse it")
    if decision.create_attempt is not None:
        found += await _children(api, namespace, observed, checked)
    return Verdict(outcome="accepted", findings=tuple(found))


def _bad_findings(answer: Mapping[str, Any], checked: SpecInvalidError, decision: Any, accepted: Any) -> list[str]:
    found = [f"a problem without a path: {error}" for error in checked.errors if not error.path and "more problems" not in error.problem]
    found += [f"a problem without a remedy: {error}" for error in checked.errors if not error.remedy]
    if decision.create_attempt is not None:
        found.append("the operator would make children of a bad spec")
    if accepted is not None and accepted.status is not ConditionStatus.FALSE:
        found.append(f"invalid, but Accepted={accepted.status}")
    if accepted is not None and review.review({"uid": "u", "object": answer})["allowed"] is not False:
        found.append("the webhook would let it pass")
    try:
        manifest.to_job(manifest.Document(data=_stored(answer)))
    except SpecInvalidError as error:
        said = [problem for problem in error.errors if _can_be_said(problem)]
        found += [f"the schema accepts a type or bound that the models refuse: {problem}" for problem in said[:1]]
    return found


def _problems(document: Mapping[str, Any]) -> list[str]:
    try:
        validation.check(document)
    except SpecInvalidError as error:
        return [str(problem) for problem in error.errors]
    return []


def _can_be_said(problem: FieldError) -> bool:
    """Whether a structural schema could refuse it: not a map's key, and not a field of several types, whose schema has none."""
    about: Mapping[str, Any] = schema.job_schema()
    for part in paths.split(problem.path):
        if not isinstance(part, int) and part not in about.get("properties", {}):
            return False
        about = about["items"] if isinstance(part, int) else about["properties"][part]
        if "type" not in about:
            return False
    return True


def _as_json(value: Any) -> Any:
    """What the API server makes of a value: nulls of fields are dropped, 1.0 is 1."""
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_as_json(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stored(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The stored object as the operator reads it."""
    metadata = {"name": answer["metadata"]["name"], "namespace": answer["metadata"]["namespace"]}
    return {"apiVersion": answer["apiVersion"], "kind": answer["kind"], "metadata": metadata, "spec": answer.get("spec")}


async def _children(api: Api, namespace: str, observed: Observed, checked: validation.CheckedJob) -> list[str]:
    """Refusals of what the operator would create."""
    found = []
    for child in desired.attempt_objects(observed.job, checked, 1, SETTINGS):
        kind = Kind(child["kind"])
        prefix = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
        status, answer = await api.answer("POST", f"{prefix}/namespaces/{namespace}/{kind.plural}{DRY}", child)
        if status >= 300:
            found.append(f"the API server refuses {kind} {child['metadata']['name']}: {str(answer.get('message'))[:600]}")
    return found
