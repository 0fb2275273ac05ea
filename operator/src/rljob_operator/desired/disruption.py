"""The PodDisruptionBudget of a job whose pods may not be evicted."""

from __future__ import annotations

from rljob_api import naming
from rljob_api.v1alpha1.rljob import RLJob
from rljob_operator.desired.metadata import child_metadata, job_labels
from rljob_operator.model import JobView, Manifest


def disruption_budget(job: JobView, resolved: RLJob) -> tuple[Manifest, ...]:
    """A budget that all pods of an attempt are needed for, head included; none unless the job asks for it.

    A number, because of pods whose controller has no scale Kubernetes takes nothing else. Pods that run and are not ready may go: an
    attempt that is stuck must not hold up a drain.
    """
    if not resolved.spec.refuse_evictions:
        return ()
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(job, naming.access_name(job.key.name), job_labels(job)),
        "spec": {
            "minAvailable": 1 + sum(group.nodes for group in resolved.spec.node_groups),
            "selector": {"matchLabels": {naming.JOB_LABEL: job.key.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
    return (budget,)
