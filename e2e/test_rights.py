"""The operator's RBAC is sufficient and minimal: its requests in all scenarios, compared with its permissions.

Runs after all other tests (see conftest.py). Sufficiency is checked in every run; minimality only if every scenario ran and passed,
because a permission may otherwise be unused for lack of the scenario that needs it.
"""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path

import pytest

from e2e.conftest import AUDIT_LOG, COLLECTED_AT, RIGHTS_FOR_A_WHILE, what_did_not_run
from e2e.environment import needed
from e2e.installation import SYSTEM
from e2e.kubectl import Kubectl
from e2e.rights import Right, forbidden, granted, requests, roles_of, used

NOT_EXERCISED = {
    # Checked by the API server itself, without a separate request, if the admission plugin OwnerReferencesPermissionEnforcement is
    # enabled, as in this cluster: our owner references set blockOwnerDeletion. Without the permission every child would be rejected.
    Right("rljob.dev", "rljobs/finalizers", "update"): "every scenario that creates a child",
    # Only after a write to an RLJob was answered with 409, because it was deleted and created again at that very moment.
    Right("rljob.dev", "rljobs", "get"): "tests/unit/operator/shell/test_reconcile.py",
    # Only for a pod whose containers have not been created for two minutes.
    Right("", "events", "list"): "tests/unit/operator/shell/test_pod_warnings.py",
}
"""Permissions that a request of a scenario uses by chance at most, as after a conflict -> the tests that cover them instead."""


def account_of_operator(kubectl: Kubectl) -> str:
    (deployment,) = kubectl.items("deployments", "app.kubernetes.io/name=rljob-operator", namespace=SYSTEM)
    name: str = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    return name


def installed_rights(kubectl: Kubectl, account: str) -> set[Right]:
    """All permissions that bindings in the cluster grant to the account, whoever installed them."""
    bindings = json.loads(kubectl("get", "clusterrolebindings,rolebindings", "--all-namespaces", "-o", "json"))["items"]
    roles = sorted(roles_of(bindings, account, SYSTEM))
    assert roles, f"no binding names {SYSTEM}/{account}: the chart was installed without RBAC"
    rules = [kubectl.get(kind, name, namespace=namespace or None).get("rules") or [] for kind, namespace, name in roles]
    return granted(itertools.chain.from_iterable(rules))


def test_the_operators_rights_are_sufficient_and_after_all_scenarios_minimal(kubectl: Kubectl, request: pytest.FixtureRequest):
    account = account_of_operator(kubectl)
    may = installed_rights(kubectl, account)
    log = Path(needed(AUDIT_LOG))
    user = f"system:serviceaccount:{SYSTEM}:{account}"
    asked = list(requests(log.read_text(), user, since=request.config.stash[COLLECTED_AT]))
    assert asked, f"{log} holds no request of {user}: is it the log of this cluster's API server?"

    assert forbidden(asked) == [], f"requests of the operator were forbidden; grant them in rljob.rules of the chart: {forbidden(asked)}"
    elsewhere = {str(right) for right in used(asked) - may - request.config.stash.get(RIGHTS_FOR_A_WHILE, set())}
    assert not elsewhere, f"allowed only by roles that are not the operator's own: {sorted(elsewhere)}"

    missing = what_did_not_run(request.session)
    if missing:
        warnings.warn(pytest.PytestWarning(f"minimality is not checked: {missing}"), stacklevel=1)
        return
    unused = may - used(asked)
    too_much = sorted(str(right) for right in unused - set(NOT_EXERCISED))
    assert not too_much, f"no scenario uses these permissions; remove them from the chart or add a scenario: {too_much}"
    stale = sorted(str(right) for right in set(NOT_EXERCISED) - may)
    assert not stale, f"not granted at all; remove them from NOT_EXERCISED: {stale}"
