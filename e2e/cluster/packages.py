"""System programs that a cluster with a node needs, and how to get them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from e2e.cluster import shell
from e2e.cluster.errors import ClusterError

CNI_PLUGINS = Path("/usr/lib/cni")

API_PROGRAMS = {"openssl": "openssl"}
"""Program to Debian package, for the API server mode."""
CLUSTER_PROGRAMS = {
    **API_PROGRAMS,
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "nft": "nftables",
    "ip": "iproute2",
    str(CNI_PLUGINS / "bridge"): "containernetworking-plugins",
    str(CNI_PLUGINS / "host-local"): "containernetworking-plugins",
    str(CNI_PLUGINS / "portmap"): "containernetworking-plugins",
}
"""For a cluster."""
IMAGE_PROGRAMS = {"buildah": "buildah", "debootstrap": "debootstrap"}
"""For building images."""
STOCK_PROGRAMS = {"skopeo": "skopeo", "containerd": "containerd", "ctr": "containerd"}
"""For unpacking them for nodes."""

_INSTALL_TIMEOUT_S = 900.0


def find(program: str) -> str | None:
    """Path of a program; system folders count even if the PATH lacks them."""
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/sbin", "/usr/sbin", "/sbin"]))


def missing(programs: dict[str, str]) -> list[str]:
    """Debian packages of those programs that are not there, each once."""
    return sorted({package for program, package in programs.items() if find(program) is None})


def require(programs: dict[str, str], say: Callable[[str], None]) -> None:
    """Install what is missing where that is possible, as root on Debian; else say what to install.

    Raises:
        ClusterError: something is missing and was not installed.
    """
    absent = missing(programs)
    if not absent:
        return
    command = f"apt-get install {' '.join(absent)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"missing Debian packages: {', '.join(absent)}. Remedy: {command} (as root), or the like on another system")
    say(f"{command} ...")
    environment = {"DEBIAN_FRONTEND": "noninteractive"}
    shell.run(["apt-get", "update", "-q"], env=environment, timeout_s=_INSTALL_TIMEOUT_S)
    shell.run(["apt-get", "install", "-y", "-q", "--no-install-recommends", *absent], env=environment, timeout_s=_INSTALL_TIMEOUT_S)
    left = missing(programs)
    if left:
        raise ClusterError(f"{command} went well, and still there is no {', '.join(p for p in programs if find(p) is None)}")


def require_root() -> None:
    """A node makes network devices, mounts and control groups.

    Raises:
        ClusterError: not root.
    """
    if os.geteuid() != 0:
        raise ClusterError(
            "a cluster with a node needs root (network, mounts, control groups). Remedy: run it as root, or use `api`, or point "
            "KUBECONFIG at a cluster of your own (kind, k3d, minikube)"
        )
