"""Names, labels and owner references of child objects."""

from __future__ import annotations

from rljob_api import naming
from rljob_api.v1alpha1.rljob import API_VERSION, KIND
from rljob_operator.model import JobView, Manifest


def child_metadata(job: JobView, name: str, labels: dict[str, str]) -> Manifest:
    """Metadata of a child, which is garbage-collected with the RLJob."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": job.key.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": job.key.namespace, "labels": labels, "ownerReferences": [owner]}


def job_labels(job: JobView) -> dict[str, str]:
    """Labels of all objects of a job."""
    return {
        "app.kubernetes.io/name": "rljob",
        "app.kubernetes.io/managed-by": "rljob-operator",
        naming.JOB_LABEL: job.key.name,
    }


def attempt_labels(job: JobView, attempt: int) -> dict[str, str]:
    """Labels of all objects of one attempt."""
    return {**job_labels(job), naming.ATTEMPT_LABEL: str(attempt)}


def pod_labels(job: JobView, attempt: int) -> dict[str, str]:
    """Labels of pods; app.kubernetes.io/name is left to KubeRay, whose services select the head by it."""
    return {naming.JOB_LABEL: job.key.name, naming.ATTEMPT_LABEL: str(attempt)}
