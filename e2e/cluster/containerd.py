"""The container runtime of the node, and the sandbox image every pod begins with."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster import archives, build, shell
from e2e.cluster.errors import ClusterError
from e2e.cluster.network import BRIDGE, CNI_NETWORK, GATEWAY, PODS
from e2e.cluster.packages import CNI_PLUGINS
from e2e.cluster.process import start, wait_ready
from e2e.cluster.state import StateFolder
from e2e.cluster.versions import version

PAUSE_IMAGE = "localhost/rljob-e2e-pause:1"

_START_DEADLINE_S = 300.0
_CTR_TIMEOUT_S = 600.0
_UNUSED_PLUGINS = ("aufs", "btrfs", "devmapper", "zfs")


def socket(folder: StateFolder) -> Path:
    """containerd's socket."""
    return folder.path / "containerd" / "containerd.sock"


def ctr(folder: StateFolder, *arguments: str | Path) -> str:
    """Run containerd's own command line on the pods' images and containers.

    Raises:
        CommandError: it failed.
    """
    return shell.run(["ctr", "--address", socket(folder), "--namespace", "k8s.io", *arguments], timeout_s=_CTR_TIMEOUT_S)


def start_containerd(folder: StateFolder) -> None:
    """Write the configuration and start it.

    Raises:
        ClusterError: it did not become ready.
    """
    place = folder.folder("containerd")
    (place / "config.toml").write_text(configuration(place))
    (folder.folder("cni") / "10-pods.conflist").write_text(json.dumps(network_configuration(folder.path), indent=1))
    record = start(folder, "containerd", ["containerd", "--config", place / "config.toml"])

    def check() -> str | None:
        try:
            ctr(folder, "version")
        except ClusterError as error:
            return str(error)
        return None

    wait_ready("containerd", check, deadline_s=_START_DEADLINE_S, folder=folder, record=record)


def configuration(place: Path) -> str:
    """containerd's configuration, with everything it keeps below ``place``."""
    disabled = ", ".join(f'"io.containerd.snapshotter.v1.{name}"' for name in _UNUSED_PLUGINS)
    return f"""version = 2
root = "{place}/root"
state = "{place}/state"
disabled_plugins = [{disabled}]
[grpc]
  address = "{place}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{place}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE (in a container) every sandbox would fail otherwise.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{place}/runc"
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
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


def load_pause_image(folder: StateFolder) -> None:
    """Make the sandbox image from our own static program (once; then it lies in the cache) and put it on the node.

    Raises:
        ClusterError: buildah or containerd refuses.
    """
    program = build.binary("pause")
    archive = archives.path("pause", build.content_key([program.read_bytes(), version("pause").encode()]))
    if not archive.exists():
        container = archives.buildah("from", "scratch").strip()
        try:
            archives.buildah("add", "--quiet", container, program, "/pause")
            archives.buildah("config", "--entrypoint", '["/pause"]', "--user", "65535:65535", container)
            archives.buildah("commit", "--quiet", container, PAUSE_IMAGE)
        finally:
            archives.buildah("rm", container)
        archives.export(PAUSE_IMAGE, archive)
    import_archive(folder, archive)


def import_archive(folder: StateFolder, archive: Path) -> None:
    """Put an image archive on the node.

    Raises:
        CommandError: containerd refuses it.
    """
    ctr(folder, "images", "import", archive)


def images(folder: StateFolder) -> set[str]:
    """Names of the images on the node.

    Raises:
        CommandError: containerd does not answer.
    """
    return set(ctr(folder, "images", "list", "--quiet").split())
