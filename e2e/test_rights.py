"""The operator's RBAC is enough and nothing more: what it asked the API server for in all scenarios, against what it may do.

Runs after all other tests (conftest.py sees to it). Enough is scored in every run; nothing more only when every scenario ran and passed,
because otherwise a right may be unused for want of the scenario that needs it.
"""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import pytest

from e2e.conftest import AUDIT_LOG, COLLECTED_AT, SYSTEM, needed, what_did_not_run
from e2e.kubectl import Kubectl
from e2e.rights import Right, granted, refused, requests, roles_of, used

NOT_MET_HERE = {
    # The API server asks about it itself, without a request of its own, where the admission plug-in OwnerReferencesPermissionEnforcement
    # is on, as in this cluster: our owner references set blockOwnerDeletion. Without the right every child would have been refused.
    Right("rljob.dev", "rljobs/finalizers", "update"): "every scenario that makes a child",
    # Only after a write to an RLJob was answered 409, because it was deleted and made anew under the same name in that very moment.
    Right("rljob.dev", "rljobs", "get"): "tests/unit/operator/shell/test_reconcile.py",
}
"""Rights that no scenario uses -> the tests that look at them instead."""


def account_of_operator(kubectl: Kubectl) -> str:
    (deployment,) = kubectl.list("deployments", "app.kubernetes.io/name=rljob-operator", namespace=SYSTEM)
    name: str = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    return name


def installed_rights(kubectl: Kubectl, account: str) -> set[Right]:
    """Every right that a binding in the cluster gives to the account, whoever installed it."""
    bindings = json.loads(kubectl("get", "clusterrolebindings,rolebindings", "--all-namespaces", "-o", "json"))["items"]
    roles = sorted(roles_of(bindings, account, SYSTEM))
    assert roles, f"no binding names {SYSTEM}/{account}: the chart was installed without RBAC"
    rules = [kubectl.get(kind, name, namespace=namespace or None).get("rules") or [] for kind, namespace, name in roles]
    return granted(itertools.chain.from_iterable(rules))


def test_the_operators_rights_are_enough_and_after_all_scenarios_nothing_more(kubectl: Kubectl, request: pytest.FixtureRequest):
    account = account_of_operator(kubectl)
    may = installed_rights(kubectl, account)
    log = Path(needed(AUDIT_LOG))
    user = f"system:serviceaccount:{SYSTEM}:{account}"
    asked = list(requests(log.read_text(), user, since=request.config.stash[COLLECTED_AT]))
    assert asked, f"{log} holds no request of {user}: is it the log of this cluster's API server?"

    assert refused(asked) == [], f"the operator was refused; grant it in rljob.rules of the chart: {refused(asked)}"
    elsewhere = {str(right) for right in used(asked) - may}
    assert not elsewhere, f"allowed by roles that are not the operator's own, and missing where those are not: {sorted(elsewhere)}"

    missing = what_did_not_run(request.session)
    if missing:
        warnings.warn(pytest.PytestWarning(f"unused rights are not scored: {missing}"), stacklevel=1)
        return
    unused = may - used(asked)
    too_much = sorted(str(right) for right in unused - set(NOT_MET_HERE))
    assert not too_much, f"no scenario uses these rights; take them out of the chart or write the scenario: {too_much}"
    stale = sorted(str(right) for right in set(NOT_MET_HERE) - unused)
    assert not stale, f"used, or not granted at all; strike them out of NOT_MET_HERE: {stale}"
