"""Permissions of a job's own service account: patch the status of its RLJob. An admission policy restricts that to progress."""

from __future__ import annotations

from rljob_api import naming
from rljob_api.crd.schema import GROUP
from rljob_operator.desired.metadata import child_metadata, job_labels
from rljob_operator.model import JobView, Manifest

_RBAC = "rbac.authorization.k8s.io"


def service_account(job: JobView) -> Manifest:
    """Service account of the head pod; the token is mounted only where a pod requests it."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": child_metadata(job, naming.access_name(job.key.name), job_labels(job)),
        "automountServiceAccountToken": False,
    }


def role(job: JobView) -> Manifest:
    """Role that allows to patch the status of this one RLJob."""
    rule = {"apiGroups": [GROUP], "resources": ["rljobs/status"], "resourceNames": [job.key.name], "verbs": ["patch"]}
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": child_metadata(job, naming.access_name(job.key.name), job_labels(job)),
        "rules": [rule],
    }


def role_binding(job: JobView) -> Manifest:
    """Binds the role to the service account."""
    name = naming.access_name(job.key.name)
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": child_metadata(job, name, job_labels(job)),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.key.namespace}],
    }
