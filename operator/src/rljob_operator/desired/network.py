"""Connections of a job's pods: ingress from its own pods, from KubeRay to the dashboard, from a few to metrics; egress as configured.

Who reads metrics is configured in the operator. Egress is open by default: models and data can be anywhere.
"""

from __future__ import annotations

from rljob_api import naming
from rljob_operator.desired.metadata import child_metadata, job_labels
from rljob_operator.model import JobView, Manifest
from rljob_operator.settings import Settings

DASHBOARD_PORT = 8265
KUBERAY = {"app.kubernetes.io/component": "kuberay-operator"}
"""Of KubeRay's pods, however it was installed: app.kubernetes.io/name differs between its helm chart and its kustomization."""


def network_policy(job: JobView, settings: Settings) -> Manifest:
    """NetworkPolicy for all attempts of a job."""
    own_pods = {"matchLabels": {naming.JOB_LABEL: job.key.name}}
    namespace = settings.kuberay_namespace
    kuberay = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}} if namespace else {},
        "podSelector": {"matchLabels": KUBERAY},
    }
    peers = settings.metrics_peers
    metrics = [{"from": peers, "ports": [{"protocol": "TCP", "port": naming.METRICS_PORT}]}] if peers else []
    rules = settings.egress_rules
    egress = {} if rules is None else {"egress": [{"to": [{"podSelector": own_pods}]}, *rules]}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": child_metadata(job, naming.access_name(job.key.name), job_labels(job)),
        "spec": {
            "podSelector": own_pods,
            "policyTypes": ["Ingress", *(["Egress"] if egress else [])],
            "ingress": [
                {"from": [{"podSelector": own_pods}]},
                {"from": [kuberay], "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}]},
                *metrics,
            ],
            **egress,
        },
    }
