"""Compares the requests of an account, from the API server's audit log, with the permissions of its roles. Pure; see test_rights.py."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

FORBIDDEN = 403
RULE_FIELDS = {"apiGroups", "resources", "verbs"}


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One verb on one resource (``pods``, ``rljobs/status``) of one API group."""

    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}" + (f" of {self.group}" if self.group else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answered request."""

    right: Right
    object: str
    """Namespace/name; empty where the request has none."""
    code: int
    """HTTP status of the answer."""


def requests(log: str, user: str, since: datetime) -> Iterator[Request]:
    """Requests of a user for resources that were answered since a time, in the order of the log (JSON lines, level Metadata).

    Requests without a resource, such as ``/apis``, are left out: the roles of this chart do not cover them.
    """
    for line in log.splitlines(keepends=True):
        if not line.endswith("\n"):
            return  # the API server is writing this one
        event = json.loads(line)
        reference = event.get("objectRef")
        if reference is None or event["user"]["username"] != user or datetime.fromisoformat(event["stageTimestamp"]) < since:
            continue
        resource = "/".join(part for part in (reference["resource"], reference.get("subresource")) if part)
        yield Request(
            right=Right(reference.get("apiGroup", ""), resource, event["verb"]),
            object="/".join(part for part in (reference.get("namespace"), reference.get("name")) if part),
            code=int(event.get("responseStatus", {}).get("code", 0)),
        )


def used(asked: Iterable[Request]) -> set[Right]:
    """Permissions that a request needed and had, whether or not the object existed."""
    return {request.right for request in asked if request.code != FORBIDDEN}


def forbidden(asked: Iterable[Request]) -> list[str]:
    """Requests answered with 403, described, each once."""
    return sorted({f"{request.right} ({request.object or 'no object'})" for request in asked if request.code == FORBIDDEN})


def granted(rules: Iterable[Mapping[str, Sequence[str]]]) -> set[Right]:
    """Expand the rules of a role into single permissions; one for certain names counts as the permission (others would be forbidden).

    Raises:
        ValueError: a rule has a wildcard, or is about paths, and cannot be expanded.
    """
    found: set[Right] = set()
    for rule in rules:
        single = {Right(*right) for right in itertools.product(*(rule.get(field, ()) for field in ("apiGroups", "resources", "verbs")))}
        if set(rule) - {"resourceNames"} != RULE_FIELDS or any("*" in (right.group, right.resource, right.verb) for right in single):
            raise ValueError(f"cannot expand the rule {dict(rule)}: it must have exactly {sorted(RULE_FIELDS)} and no wildcards")
        found |= single
    return found


def roles_of(bindings: Iterable[Mapping[str, Any]], account: str, namespace: str) -> set[tuple[str, str, str]]:
    """Kind, namespace (empty: cluster-scoped) and name of the roles that are bound to a ServiceAccount."""
    subject = {"kind": "ServiceAccount", "name": account, "namespace": namespace}
    return {
        (role["kind"], binding["metadata"].get("namespace", "") if role["kind"] == "Role" else "", role["name"])
        for binding in bindings
        for role in [binding["roleRef"]]
        if any({field: given.get(field) for field in subject} == subject for given in binding.get("subjects") or ())
    }
