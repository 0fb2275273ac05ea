"""Permissions of a job's service account: patch the status of its RLJob. An admission policy restricts that to progress.

The account is one that the operator makes for the job, or one of the user's that exists.
"""

from __future__ import annotations

from rljob_api import naming
from rljob_api.crd.schema import GROUP
from rljob_api.v1alpha1.rljob import RLJob
from rljob_operator.desired.metadata import child_metadata, job_labels
from rljob_operator.model import JobView, Manifest

_RBAC = "rbac.authorization.k8s.io"


def account_name(job: JobView, resolved: RLJob) -> str:
    """Account of the head pod."""
    account = resolved.spec.service_account
    return naming.access_name(job.key.name) if account is None or account.name is None else account.name


def service_account(job: JobView, resolved: RLJob) -> tuple[Manifest, ...]:
    """Service account of the head pod, or none where the user names one; the token is mounted only where a pod requests it."""
    name, account = naming.access_name(job.key.name), resolved.spec.service_account
    if account_name(job, resolved) != name:
        return ()
    metadata = child_metadata(job, name, job_labels(job))
    if account is not None and account.annotations:
        metadata["annotations"] = dict(account.annotations)
    return ({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata, "automountServiceAccountToken": False},)


def role(job: JobView) -> Manifest:
    """Role that allows to patch the status of this one RLJob."""
    rule = {"apiGroups": [GROUP], "resources": ["rljobs/status"], "resourceNames": [job.key.name], "verbs": ["patch"]}
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "Role",
        "metadata": child_metadata(job, naming.access_name(job.key.name), job_labels(job)),
        "rules": [rule],
    }


def role_binding(job: JobView, resolved: RLJob) -> Manifest:
    """Binds the role to the account of the head pod."""
    name = naming.access_name(job.key.name)
    return {
        "apiVersion": f"{_RBAC}/v1",
        "kind": "RoleBinding",
        "metadata": child_metadata(job, name, job_labels(job)),
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account_name(job, resolved), "namespace": job.key.namespace}],
    }
