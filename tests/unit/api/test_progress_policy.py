"""The policy as text; that the API server enforces it is shown by the integration tests."""

from typing import Any

import pytest

from rljob_api import naming
from rljob_api.crd import progress_policy
from rljob_api.v1alpha1.status import RLJobStatus

POLICY, BINDING = progress_policy.manifests()


def test_every_field_of_the_status_but_progress_is_held() -> None:
    held = [rule["expression"] for rule in POLICY["spec"]["validations"]]
    fields = [str(info.alias) for info in RLJobStatus.model_fields.values() if info.alias != "progress"]
    assert len(held) == len(fields)
    for field, expression in zip(fields, held, strict=True):
        assert f"has(variables.before.{field})" in expression
        assert f"has(variables.after.{field})" in expression
    assert not any("progress" in expression for expression in held)


def test_it_is_about_the_accounts_of_jobs_only() -> None:
    (condition,) = POLICY["spec"]["matchConditions"]
    account = naming.access_name("' + request.name + '").split("'")
    assert account == ["", " + request.name + ", "-rljob"]
    own = "request.userInfo.username == 'system:serviceaccount:' + request.namespace + ':' + request.name + '-rljob'"
    other = "request.userInfo.username.startsWith('system:serviceaccount:' + request.namespace + ':')"
    this = "authorizer.group('rljob.dev').resource('rljobs').namespace(request.namespace).name(request.name)"
    may_delete = f"{this}.check('delete').allowed()"
    assert condition["expression"] == f"{own} || ({other} && !{may_delete})"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("failurePolicy",), "Fail"),
        (("matchConstraints", "resourceRules", 0, "resources"), ["rljobs/status"]),
        (("matchConstraints", "resourceRules", 0, "operations"), ["UPDATE"]),
    ],
)
def test_what_it_matches(path: tuple[str | int, ...], expected: object) -> None:
    here: Any = POLICY["spec"]
    for part in path:
        here = here[part]
    assert here == expected


def test_the_binding_denies() -> None:
    assert BINDING["spec"] == {"policyName": POLICY["metadata"]["name"], "validationActions": ["Deny"]}


def test_helm_would_not_read_it_as_a_template() -> None:
    assert "{{" not in repr(progress_policy.manifests())
