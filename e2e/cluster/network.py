"""The cluster's addresses, the bridge its pods hang on, and the kernel settings it changes."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

from e2e.cluster import shell
from e2e.cluster.errors import ClusterError
from e2e.cluster.state import StateFolder

# From the range for benchmarks (RFC 2544): private ranges may well be in use where this runs.
PODS = "198.18.0.0/16"
SERVICES = "198.19.0.0/16"
GATEWAY = "198.18.0.1"
"""The bridge's address: the node's, the API server's for pods, and the DNS server's."""
SERVICE_IP = "198.19.0.1"
"""Address of the service ``kubernetes``."""
BRIDGE = "rljob-e2e0"
CNI_NETWORK = "rljob-e2e"
"""Name of the pods' network; the plugins' files begin with it."""

NFT_TABLES = ("ip kube-proxy", "ip6 kube-proxy")
_SYSCTLS = (
    "net/ipv4/ip_forward",
    # The kubelet sets these.
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)
_PROC_SYS = Path("/proc/sys")
_TIMEOUT_S = 30.0


def create(folder: StateFolder) -> None:
    """Make the bridge and let the kernel forward packets.

    Raises:
        ClusterError: the addresses are in use, or the kernel refuses.
    """
    _require_free_addresses()
    folder.update(
        sysctls={name: (_PROC_SYS / name).read_text().strip() for name in _SYSCTLS if (_PROC_SYS / name).exists()},
        bridge=BRIDGE,
        nft_tables=tuple(table for table in NFT_TABLES if table not in _nft_tables()),
    )
    _ip("link", "add", BRIDGE, "type", "bridge")
    _ip("address", "add", f"{GATEWAY}/{PODS.rpartition('/')[2]}", "dev", BRIDGE)
    _ip("link", "set", BRIDGE, "up")
    set_sysctl("net/ipv4/ip_forward", "1")


def delete(*, bridge: str | None, nft_tables: tuple[str, ...], sysctls: dict[str, str]) -> None:
    """Undo :func:`create` and what kube-proxy added; what is gone already is no error.

    Raises:
        ClusterError: the kernel refuses.
    """
    present = _nft_tables() if nft_tables else set()
    for table in nft_tables:
        if table in present:
            shell.run(["nft", "delete", "table", *table.split()], timeout_s=_TIMEOUT_S)
    if bridge and Path("/sys/class/net", bridge).exists():
        _ip("link", "delete", bridge)
    for name, value in sysctls.items():
        set_sysctl(name, value)


def set_sysctl(name: str, value: str) -> None:
    """Set a kernel setting if it differs.

    Raises:
        ClusterError: the kernel refuses.
    """
    path = _PROC_SYS / name
    try:
        if path.read_text().strip() != value:
            path.write_text(value)
    except OSError as error:
        raise ClusterError(f"{path}: cannot set {value}: {error.strerror}") from error


def _require_free_addresses() -> None:
    wanted = [ipaddress.ip_network(PODS), ipaddress.ip_network(SERVICES)]
    for interface in json.loads(_ip("-json", "address", "show")):
        for address in interface.get("addr_info", []):
            if any(ipaddress.ip_address(address["local"]) in network for network in wanted):
                raise ClusterError(
                    f"interface {interface['ifname']} has the address {address['local']}, which lies in the cluster's own {PODS} or "
                    f"{SERVICES}. Remedy: another cluster of this kind is up: stop it, or delete the interface"
                )


def _nft_tables() -> set[str]:
    listed = shell.run(["nft", "list", "tables"], timeout_s=_TIMEOUT_S)
    return {line.removeprefix("table ").strip() for line in listed.splitlines()}


def _ip(*arguments: str) -> str:
    return shell.run(["ip", *arguments], timeout_s=_TIMEOUT_S)
