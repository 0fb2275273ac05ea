"""The node: kubelet, kube-proxy, cluster DNS, and devices that do not exist."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from e2e.cluster import control_plane, pki, probe
from e2e.cluster.build import binary
from e2e.cluster.containerd import of_node
from e2e.cluster.control_plane import LOOPBACK
from e2e.cluster.errors import ClusterError, CommandError
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.network import GATEWAY, PODS
from e2e.cluster.process import start, wait_ready
from e2e.cluster.state import StateFolder
from e2e.cluster.wait import wait_until

NODE = "node-0"
DEVICE = "example.com/virtual-gpu"
"""An extended resource that nothing stands behind. Its name ends in gpu, so that KubeRay gives it to Ray as GPUs."""
NUM_DEVICES = 16
PORTS = ("kubelet", "kubelet-health", "kube-proxy-health", "kube-proxy-metrics", "coredns-health")

FIXED_FILES = tuple(Path("/var/lib/kubelet/device-plugins", name) for name in ("kubelet.sock", "kubelet_internal_checkpoint"))
"""The kubelet's files whose place cannot be chosen."""

_DEADLINE_S = 300.0


def start_node(folder: StateFolder) -> None:
    """Start kubelet, kube-proxy and CoreDNS, wait until the node is ready, and give it its devices.

    Raises:
        ClusterError: something did not become ready.
    """
    certificates, ports = control_plane.pki_of(folder), folder.require().ports
    certificates.sign(pki.node_identity(NODE))
    certificates.sign(pki.PROXY)
    kubelet = start(folder, "kubelet", _kubelet_arguments(folder), first=True)
    kube_proxy = start(folder, "kube-proxy", _proxy_arguments(folder))
    (folder.path / "Corefile").write_text(corefile(folder.kubeconfig, ports["coredns-health"]))
    coredns = start(folder, "coredns", [binary("coredns"), "-conf", folder.path / "Corefile"])
    for record, port in ((kube_proxy, ports["kube-proxy-health"]), (coredns, ports["coredns-health"])):
        path = "livez" if record is kube_proxy else "health"
        wait_ready(record.name, probe.http_ok(f"http://{LOOPBACK}:{port}/{path}"), deadline_s=_DEADLINE_S, folder=folder, record=record)
    kubectl = Kubectl(kubeconfig=folder.kubeconfig)
    wait_ready(f"{NODE} to be Ready", lambda: _not_ready(kubectl), deadline_s=_DEADLINE_S, folder=folder, record=kubelet)
    add_devices(kubectl)


def require_no_other_kubelet() -> None:
    """Two kubelets on one machine would take each other's fixed files.

    Raises:
        ClusterError: the files are there.
    """
    there = [str(path) for path in FIXED_FILES if path.exists()]
    if there:
        raise ClusterError(f"another kubelet runs on this machine, or left {' and '.join(there)}. Remedy: stop it, or delete what it left")


def add_devices(kubectl: Kubectl, number: int = NUM_DEVICES) -> None:
    """Set the node's capacity of :data:`DEVICE`; the kubelet makes it allocatable with its next report.

    Raises:
        CommandError: the API server refuses.
    """
    path = f"/status/capacity/{DEVICE.replace('/', '~1')}"
    patch = json.dumps([{"op": "add", "path": path, "value": str(number)}])
    kubectl("patch", "node", NODE, "--subresource=status", "--type=json", "-p", patch)


def wait_for_devices(folder: StateFolder) -> None:
    """Wait until pods can ask for the devices.

    Raises:
        ClusterError: not within the deadline.
    """
    kubectl = Kubectl(kubeconfig=folder.kubeconfig)

    def check() -> str | None:
        allocatable = kubectl.json("get", "node", NODE)["status"].get("allocatable", {}).get(DEVICE, "0")
        return None if allocatable == str(NUM_DEVICES) else f"{allocatable} of {NUM_DEVICES} {DEVICE} are allocatable"

    wait_until(f"{NODE}'s devices", check, deadline_s=_DEADLINE_S, poll_s=0.5)


def _not_ready(kubectl: Kubectl) -> str | None:
    try:
        status = kubectl.json("get", "node", NODE)["status"]
    except CommandError as error:
        return str(error)
    for condition in status.get("conditions", []):
        if condition["type"] == "Ready":
            return None if condition["status"] == "True" else f"{condition['reason']}: {condition['message']}"
    return "the node has no condition Ready yet"


def _kubelet_arguments(folder: StateFolder) -> list[str]:
    configuration = folder.path / "kubelet.yaml"
    configuration.write_text(yaml.safe_dump(kubelet_configuration(folder), sort_keys=False))
    return [
        str(binary("kubelet")), f"--config={configuration}",
        f"--kubeconfig={control_plane.write_kubeconfig(folder, pki.node_identity(NODE))}", f"--hostname-override={NODE}",
        f"--node-ip={GATEWAY}", f"--root-dir={folder.path / 'kubelet'}", f"--cert-dir={folder.path / 'kubelet' / 'pki'}",
    ]  # fmt: skip


def kubelet_configuration(folder: StateFolder) -> dict[str, object]:
    """The kubelet's configuration: everything below the state folder, no demands on the machine beyond what pods need."""
    ports = folder.require().ports
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": GATEWAY,
        "port": ports["kubelet"],
        "healthzBindAddress": LOOPBACK,
        "healthzPort": ports["kubelet-health"],
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(control_plane.pki_of(folder).ca)},
        },
        "containerRuntimeEndpoint": f"unix://{of_node(folder).socket}",
        "podLogsDir": str(folder.path / "pod-logs"),
        "volumePluginDir": str(folder.path / "kubelet" / "volume-plugins"),
        "clusterDomain": "cluster.local",
        "clusterDNS": [GATEWAY],
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "enforceNodeAllocatable": [],
        "localStorageCapacityIsolation": False,
        # Images come from here only; one that is thrown away could not be pulled again.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "containerLogMaxSize": "20Mi",
        # Seen by the next report, so that devices and readiness show in seconds.
        "nodeStatusUpdateFrequency": "2s",
    }


def _proxy_arguments(folder: StateFolder) -> list[str]:
    ports = folder.require().ports
    return [
        str(binary("kube-proxy")), f"--kubeconfig={control_plane.write_kubeconfig(folder, pki.PROXY)}", f"--hostname-override={NODE}",
        "--proxy-mode=nftables", f"--cluster-cidr={PODS}", "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
        f"--healthz-bind-address={LOOPBACK}:{ports['kube-proxy-health']}",
        f"--metrics-bind-address={LOOPBACK}:{ports['kube-proxy-metrics']}",
    ]  # fmt: skip


def corefile(kubeconfig: Path, health_port: int) -> str:
    """CoreDNS's configuration: the cluster's names only, on the bridge's address."""
    return f""".:53 {{
    bind {GATEWAY}
    errors
    health {LOOPBACK}:{health_port}
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig}
        pods insecure
    }}
    cache 5
}}
"""
