"""Kinds have the words that kubectl takes."""

import pytest

from e2e.objects import KubectlError, path


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("pods", "api/v1/namespaces/team/pods"),
        ("rljob", "apis/rljob.dev/v1alpha1/namespaces/team/rljobs"),
        ("networkpolicy", "apis/networking.k8s.io/v1/namespaces/team/networkpolicies"),
        ("RoleBinding", "apis/rbac.authorization.k8s.io/v1/namespaces/team/rolebindings"),
        ("ClusterRole", "apis/rbac.authorization.k8s.io/v1/clusterroles"),
    ],
)
def test_where_objects_are(kind: str, expected: str):
    assert path(kind, "team") == expected


def test_another_kind_is_refused_with_those_there_are():
    with pytest.raises(KubectlError, match=r"'gadgets' is none of the kinds known here: clusterrolebindings, .*; add it"):
        path("gadgets", "team")
