"""The container runtime of the node."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster import node_images
from e2e.cluster.errors import ClusterError
from e2e.cluster.network import BRIDGE, CNI_NETWORK, GATEWAY, PODS
from e2e.cluster.node_images import CRI, Containerd
from e2e.cluster.packages import CNI_PLUGINS
from e2e.cluster.process import start, wait_ready
from e2e.cluster.state import StateFolder

_START_DEADLINE_S = 300.0


def of_node(folder: StateFolder) -> Containerd:
    """The one of this cluster."""
    return Containerd(place=folder.folder("containerd"))


def start_containerd(folder: StateFolder, sandbox_image: str) -> None:
    """Write the configuration and start it.

    Args:
        folder: the cluster.
        sandbox_image: every pod begins with it.

    Raises:
        ClusterError: it did not become ready.
    """
    place = folder.folder("containerd")
    (place / "config.toml").write_text(configuration(place, sandbox_image))
    (folder.folder("cni") / "10-pods.conflist").write_text(json.dumps(network_configuration(folder.path), indent=1))
    record = start(folder, "containerd", ["containerd", "--config", place / "config.toml"])

    def check() -> str | None:
        try:
            of_node(folder).ctr("version")
        except ClusterError as error:
            return str(error)
        return None

    wait_ready("containerd", check, deadline_s=_START_DEADLINE_S, folder=folder, record=record)


def configuration(place: Path, sandbox_image: str) -> str:
    """Of a node's containerd."""
    return f"""{node_images.configuration(place)}[plugins."{CRI}"]
  sandbox_image = "{sandbox_image}"
  # Without CAP_SYS_RESOURCE (in a container) every sandbox would fail otherwise.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."{CRI}".containerd]
    snapshotter = "overlayfs"
  [plugins."{CRI}".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."{CRI}".containerd.runtimes.runc.options]
      Root = "{place}/runc"
      SystemdCgroup = false
  [plugins."{CRI}".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{place.parent}/cni"
"""


def network_configuration(state: Path) -> dict[str, object]:
    """How a pod gets its address: a port on the bridge, addresses handed out from a folder."""
    addresses = {
        "type": "host-local",
        "dataDir": str(state / "addresses"),
        "ranges": [[{"subnet": PODS, "gateway": GATEWAY}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {
        "cniVersion": "0.4.0",
        "name": CNI_NETWORK,
        "plugins": [
            {"type": "bridge", "bridge": BRIDGE, "isGateway": True, "hairpinMode": True, "ipam": addresses},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
