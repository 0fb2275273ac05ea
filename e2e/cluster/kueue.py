"""Kueue: its CRDs and webhooks, and its manager as a process of this machine.

A cluster's chart has a Service in front of the manager and lets it make its own certificates; here the API server finds it on the loopback
interface, with a certificate of the cluster's own authority. All else is as the release has it.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster import control_plane, crds, pki, probe
from e2e.cluster.build import binary, module_files
from e2e.cluster.control_plane import LOOPBACK
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.process import start, wait_ready
from e2e.cluster.state import StateFolder
from e2e.cluster.versions import KUEUE_CRDS, KUEUE_WEBHOOKS

PORTS = ("kueue-health", "kueue-webhook")
NAMESPACE = "kueue-system"
MANAGED = {"e2e.rljob.dev/kueue": "managed"}
"""Label of the namespaces whose jobs Kueue manages."""

FIXED_FILES = (Path("/etc/kueue/metrics/certs/tls.crt"), Path("/etc/kueue/metrics/certs/tls.key"))
"""Of a certificate that the manager reads even where it serves no metrics; nothing configures this place."""

_CONVERTED = ("clusterqueues", "cohorts", "localqueues", "multikueueclusters", "workloads")
"""Resources that the manager converts between versions of their API, as the release's kustomization lists them."""
_ADMITTED = re.compile(r"/(mutate|validate)-(ray|kueue-x-k8s)-io-v[^-]+-(?P<kind>[a-z]+)")
_KINDS = frozenset({"rayjob", "raycluster", "clusterqueue", "cohort", "resourceflavor", "workload"})
"""Webhooks of these are installed: the others are of frameworks that this cluster does not have."""
_WEBHOOK = pki.Identity(name="kueue-webhook", common_name="kueue-webhook", names=(LOOPBACK,))
_START_DEADLINE_S = 300.0


def start_kueue(folder: StateFolder) -> None:
    """Install CRDs and webhooks, then start the manager.

    Raises:
        ClusterError: an object was refused, or the manager did not become ready.
    """
    kubectl, ports, certificates = Kubectl(kubeconfig=folder.kubeconfig), folder.require().ports, control_plane.pki_of(folder)
    certificates.sign(_WEBHOOK)
    client = _Client(url=f"https://{LOOPBACK}:{ports['kueue-webhook']}", ca=certificates.ca.read_bytes())
    files = folder.folder("kueue")
    crd_files = [_written(files / source.name, [client.converting(_read(source)[0])]) for source in module_files(KUEUE_CRDS)]
    crds.install(kubectl, crd_files)
    kubectl("create", "namespace", NAMESPACE)
    manager = start(
        folder, "kueue",
        [binary("kueue"), f"--kubeconfig={folder.kubeconfig}", f"--config={_written(files / 'manager.yaml', [_configuration(folder)])}"],
    )  # fmt: skip
    health = probe.http_ok(f"http://{LOOPBACK}:{ports['kueue-health']}/readyz")
    wait_ready("Kueue's manager", health, deadline_s=_START_DEADLINE_S, folder=folder, record=manager)
    (source,) = module_files(KUEUE_WEBHOOKS)
    kubectl.apply(_written(files / source.name, [client.admitting(item) for item in _read(source)]))


class _Client:
    """How the API server calls the manager."""

    def __init__(self, *, url: str, ca: bytes) -> None:
        self._url = url
        self._ca = base64.b64encode(ca).decode()

    def _config(self, path: str) -> dict[str, str]:
        return {"url": f"{self._url}{path}", "caBundle": self._ca}

    def converting(self, crd: dict[str, Any]) -> dict[str, Any]:
        """The CRD, converted by the manager where the release has it so."""
        if crd["spec"]["names"]["plural"] in _CONVERTED:
            webhook = {"clientConfig": self._config("/convert"), "conversionReviewVersions": ["v1"]}
            crd["spec"]["conversion"] = {"strategy": "Webhook", "webhook": webhook}
        return crd

    def admitting(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """The webhook configuration, without the frameworks that are not here."""
        kept = []
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            found = _ADMITTED.fullmatch(path)
            if found and found["kind"] in _KINDS:
                kept.append({**webhook, "clientConfig": self._config(path)})
        name = f"kueue-{configuration['metadata']['name']}"
        return {**configuration, "metadata": {"name": name}, "webhooks": kept}


def _configuration(folder: StateFolder) -> dict[str, object]:
    """The manager's configuration: the release's defaults, on loopback ports, for Ray only, in namespaces with :data:`MANAGED`.

    There it manages jobs without a queue as well, which its defaults leave alone.
    """
    ports, certificates = folder.require().ports, control_plane.pki_of(folder)
    served = folder.folder("kueue-certificates")
    for source, fixed in zip((certificates.certificate(_WEBHOOK), certificates.key(_WEBHOOK)), FIXED_FILES, strict=True):
        fixed.parent.mkdir(parents=True, exist_ok=True)
        for target in (fixed, served / fixed.name):
            target.write_bytes(source.read_bytes())
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f"{LOOPBACK}:{ports['kueue-health']}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": LOOPBACK, "port": ports["kueue-webhook"], "certDir": str(served)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "featureGates": {"VisibilityOnDemand": False},  # an API server of its own, which nothing here asks
        "manageJobsWithoutQueueName": True,
        "managedJobsNamespaceSelector": {"matchLabels": MANAGED},
        "integrations": {"frameworks": ["ray.io/rayjob", "ray.io/raycluster"]},
    }


def _read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def _written(path: Path, items: Iterable[object]) -> Path:
    path.write_text(yaml.safe_dump_all(items, sort_keys=False))
    return path
