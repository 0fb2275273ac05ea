"""KubeRay: its CRDs, and its operator as a process of this machine."""

from __future__ import annotations

from e2e.cluster import crds, probe
from e2e.cluster.build import binary, module_files
from e2e.cluster.control_plane import LOOPBACK
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.process import start, wait_ready
from e2e.cluster.state import StateFolder
from e2e.cluster.versions import KUBERAY_CRDS

PORTS = ("ray-operator-health",)

_START_DEADLINE_S = 300.0


def start_kuberay(folder: StateFolder) -> None:
    """Install the CRDs, then start the operator, which fails without them.

    Raises:
        ClusterError: a CRD was refused, or the operator did not become ready.
    """
    crds.install(Kubectl(kubeconfig=folder.kubeconfig), module_files(KUBERAY_CRDS))
    port = folder.require().ports["ray-operator-health"]
    operator = start(
        folder, "ray-operator",
        [
            binary("ray-operator"), f"--kubeconfig={folder.kubeconfig}", "--enable-leader-election=false", "--metrics-addr=0",
            f"--health-probe-bind-address={LOOPBACK}:{port}", "--reconcile-concurrency=4",
            "--use-kubernetes-proxy",  # it runs outside the cluster, where service names mean nothing
        ],
    )  # fmt: skip
    wait_ready(
        "KubeRay's operator", probe.http_ok(f"http://{LOOPBACK}:{port}/readyz"),
        deadline_s=_START_DEADLINE_S, folder=folder, record=operator,
    )  # fmt: skip
