"""The ValidatingAdmissionPolicy that lets a job's account change ``status.progress`` of its RLJob and nothing else.

RBAC can only say "the status of this object"; this says which part of it. Pure: written to a file by :mod:`rljob_api.generate`.
"""

from __future__ import annotations

from typing import Any

from rljob_api import naming
from rljob_api.crd.schema import GROUP
from rljob_api.v1alpha1.status import RLJobStatus

NAME = "rljob-progress"
MESSAGE = "the job's own account may change status.progress only"


def manifests() -> list[dict[str, Any]]:
    """The policy and its binding, as plain JSON."""
    policy = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": NAME},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {
                "resourceRules": [
                    {"apiGroups": [GROUP], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["rljobs/status"]},
                ]
            },
            "matchConditions": [{"name": "job-account", "expression": _is_job_account()}],
            "variables": [
                {"name": "before", "expression": "has(oldObject.status) ? oldObject.status : {}"},
                {"name": "after", "expression": "has(object.status) ? object.status : {}"},
            ],
            "validations": [
                {"expression": _unchanged(str(info.alias), is_list=info.default == ()), "message": MESSAGE}
                for info in RLJobStatus.model_fields.values()
                if info.alias != "progress"
            ],
        },
    }
    binding = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": NAME},
        "spec": {"policyName": NAME, "validationActions": ["Deny"]},
    }
    return [policy, binding]


def _is_job_account() -> str:
    """Whether the request comes from an account that writes progress.

    That is the one that the operator made for the very object that is changed, or an account of the object's namespace that may not delete
    the object: spec.serviceAccount.name may name any, and the operator, whose account may be there too, deletes jobs. Not just any account
    whose name ends like those that the operator makes: a Helm release may well call the operator's own so.
    """
    account = "'system:serviceaccount:' + request.namespace + ':'"
    own = f"request.userInfo.username == {account} + request.name + '{naming.access_name('')}'"
    resource = f"authorizer.group('{GROUP}').resource('rljobs').namespace(request.namespace).name(request.name)"
    return f"{own} || (request.userInfo.username.startsWith({account}) && !{resource}.check('delete').allowed())"


def _unchanged(field: str, *, is_list: bool) -> str:
    """Same value before and after. An absent list equals an empty one: the server fills in that default with the first progress."""
    before, after = f"variables.before.{field}", f"variables.after.{field}"
    if is_list:
        return f"(has({before}) ? {before} : []) == (has({after}) ? {after} : [])"
    return f"has({before}) == has({after}) && (!has({before}) || {before} == {after})"
