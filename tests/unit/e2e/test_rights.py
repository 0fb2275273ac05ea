"""Requests from an audit log, compared with the permissions of roles."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from e2e.rights import Request, Right, forbidden, granted, requests, roles_of, used

USER = "system:serviceaccount:rljob-system:rljob-operator"
START = datetime(2026, 1, 1, 12, tzinfo=UTC)


def line(verb: str, reference: dict[str, str] | None, code: int = 200, user: str = USER, at: str = "2026-01-01T12:00:01.000000Z") -> str:
    event: dict[str, Any] = {
        "kind": "Event",
        "apiVersion": "audit.k8s.io/v1",
        "level": "Metadata",
        "stage": "ResponseComplete",
        "verb": verb,
        "user": {"username": user, "groups": ["system:serviceaccounts"]},
        "responseStatus": {"metadata": {}, "code": code},
        "requestReceivedTimestamp": at,
        "stageTimestamp": at,
    }
    return json.dumps(event if reference is None else event | {"objectRef": reference}) + "\n"


STATUS = {"resource": "rljobs", "subresource": "status", "namespace": "team", "name": "math", "apiGroup": "rljob.dev"}
PODS = {"resource": "pods", "apiVersion": "v1"}


def test_resource_subresource_group_and_object_are_read():
    assert list(requests(line("patch", STATUS) + line("watch", PODS), USER, START)) == [
        Request(right=Right("rljob.dev", "rljobs/status", "patch"), object="team/math", code=200),
        Request(right=Right("", "pods", "watch"), object="", code=200),
    ]


@pytest.mark.parametrize(
    "other",
    [
        line("list", PODS, user="system:serviceaccount:rljob-system:other"),
        line("list", PODS, at="2026-01-01T11:59:59.999999Z"),
        line("get", None),
        line("list", PODS).removesuffix("\n"),
        line("list", PODS)[:40],
    ],
    ids=["another account", "an earlier run", "no resource", "no line end yet", "half a line"],
)
def test_what_is_not_a_request_of_this_run_is_left_out(other: str):
    assert [request.right.verb for request in requests(line("watch", PODS) + other, USER, START)] == ["watch"]


def test_a_broken_line_in_the_middle_is_an_error():
    with pytest.raises(json.JSONDecodeError):
        list(requests(line("list", PODS)[:40] + "\n" + line("list", PODS), USER, START))


def test_a_right_is_used_by_whatever_was_not_refused():
    asked = list(requests(line("get", PODS, 404) + line("create", PODS, 409) + line("delete", PODS, 403), USER, START))
    assert used(asked) == {Right("", "pods", "get"), Right("", "pods", "create")}


def test_what_was_refused_is_reported_once_with_verb_and_resource():
    asked = list(requests(line("patch", STATUS, 403) * 3 + line("list", PODS, 403) + line("list", PODS), USER, START))
    assert forbidden(asked) == ["list pods (no object)", "patch rljobs/status of rljob.dev (team/math)"]


def test_rules_are_taken_apart():
    rules = [
        {"apiGroups": [""], "resources": ["configmaps", "pods"], "verbs": ["get"]},
        {"apiGroups": ["rljob.dev"], "resources": ["rljobs/status"], "verbs": ["patch", "get"]},
    ]
    may = granted(rules)
    assert may == {
        Right("", "configmaps", "get"),
        Right("", "pods", "get"),
        Right("rljob.dev", "rljobs/status", "patch"),
        Right("rljob.dev", "rljobs/status", "get"),
    }
    asked = requests(line("patch", STATUS) + line("get", PODS), USER, START)
    assert sorted(str(right) for right in may - used(asked)) == ["get configmaps", "get rljobs/status of rljob.dev"]


@pytest.mark.parametrize(
    "rule",
    [
        {"apiGroups": ["*"], "resources": ["pods"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["*"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["*"]},
        {"nonResourceURLs": ["/metrics"], "verbs": ["get"]},
    ],
)
def test_rules_that_cannot_be_taken_apart_are_an_error(rule: dict[str, list[str]]):
    with pytest.raises(ValueError, match="cannot expand the rule"):
        granted([rule])


def test_a_permission_for_certain_names_is_one():
    rule = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["patch"], "resourceNames": ["rljob-operator"]}
    assert granted([rule]) == {Right("coordination.k8s.io", "leases", "patch")}


def test_roles_are_found_by_the_accounts_name_and_namespace():
    def binding(role: dict[str, str], *subjects: dict[str, str], namespace: str | None = None) -> dict[str, Any]:
        metadata = {"name": "b"} | ({"namespace": namespace} if namespace else {})
        return {"metadata": metadata, "roleRef": role, "subjects": list(subjects)}

    operator = {"kind": "ServiceAccount", "name": "rljob-operator", "namespace": "rljob-system"}
    bindings = [
        binding({"kind": "ClusterRole", "name": "all"}, operator),
        binding({"kind": "Role", "name": "here"}, {"kind": "Group", "name": "g"}, operator, namespace="team"),
        binding({"kind": "ClusterRole", "name": "narrowed"}, operator, namespace="team"),
        binding({"kind": "ClusterRole", "name": "twin"}, operator | {"namespace": "team"}),
        binding({"kind": "ClusterRole", "name": "user"}, {"kind": "User", "name": "rljob-operator"}),
        {"metadata": {"name": "nobody"}, "roleRef": {"kind": "ClusterRole", "name": "nobody"}},
    ]
    found = roles_of(bindings, "rljob-operator", "rljob-system")
    assert found == {("ClusterRole", "", "all"), ("Role", "team", "here"), ("ClusterRole", "", "narrowed")}
