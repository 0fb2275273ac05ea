"""Enforces the NetworkPolicies of the built cluster, whose bridge lets every pod reach every other one.

A network plug-in in small, with nftables: who may connect is evaluated for each pair of pods (tests/support/network_policy.py), and the
first packet of a TCP connection that nobody allows is dropped, on the bridge and where the kernel routes (Services). Pods come and go: the
rules follow twice a second, as those of real plug-ins do, a moment late. Connections from the node itself are never dropped.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from e2e.kubectl import Kubectl
from tests.support.network_policy import Endpoint, Policy, allows

TABLE = "rljob_e2e_policies"
FAMILIES = {"bridge": "ether type ip ", "ip": ""}
"""Of nftables, with what begins a match of addresses there."""
FIRST_PACKET = "tcp flags & (syn | ack) == syn"
UNLISTED_PORT = 1
"""Stands for all ports that no policy names."""
PERIOD_S = 0.5
COMMAND_TIMEOUT_S = 30.0


def rules(policies: Sequence[Policy], pods: Sequence[Endpoint]) -> str:
    """Commands of nft that put the policies in the place of those before."""
    lines = []
    for family, begin in FAMILIES.items():
        chain = [f"{begin}{line}" for line in _chain(policies, pods)]
        body = "\n    ".join(["type filter hook forward priority 0; policy accept;", *chain])
        lines.append(
            f"table {family} {TABLE}\ndelete table {family} {TABLE}\ntable {family} {TABLE} {{\n  chain forward {{\n    {body}\n  }}\n}}"
        )
    return "\n".join(lines) + "\n"


def _chain(policies: Sequence[Policy], pods: Sequence[Endpoint]) -> Iterator[str]:
    ports = sorted({port for policy in policies for port in _ports(policy)})
    for target in pods:
        for source in pods:
            pair = f"ip saddr {source.address} ip daddr {target.address} {FIRST_PACKET}"
            if source == target or allows(policies, source, target, UNLISTED_PORT):
                yield f"{pair} accept"
                continue
            for port in ports:
                if allows(policies, source, target, port):
                    yield f"{pair} tcp dport {port} accept"
            yield f"{pair} drop"
        if not allows(policies, Endpoint(address=target.address), target, UNLISTED_PORT):
            yield f"ip daddr {target.address} {FIRST_PACKET} drop"  # from a pod that is not known yet


def _ports(policy: Policy) -> Iterator[int]:
    for direction in ("ingress", "egress"):
        for rule in policy["spec"].get(direction) or ():
            for entry in rule.get("ports") or ():
                yield from range(entry["port"], entry.get("endPort", entry["port"]) + 1)


@contextmanager
def enforcing(kubectl: Kubectl) -> Iterator[None]:
    """Enforce the policies of kubectl's namespace; at the end everything is let through again.

    Raises:
        AssertionError: at the end, where a change could not be followed.
    """
    over, problems, current = threading.Event(), list[BaseException](), ""

    def follow() -> None:
        nonlocal current
        try:
            wanted = rules(*_cluster(kubectl))
            if wanted != current:
                _nft(wanted)
                current = wanted
        except (AssertionError, ValueError, subprocess.SubprocessError) as error:
            problems.append(error)

    def run() -> None:
        while not over.wait(PERIOD_S):
            follow()

    follow()
    thread = threading.Thread(target=run, name="network policies")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        for family in FAMILIES:
            _nft(f"table {family} {TABLE}\ndelete table {family} {TABLE}\n")
    assert not problems, f"{len(problems)} changes of policies or pods could not be followed: {problems[-1]}"


def _cluster(kubectl: Kubectl) -> tuple[list[dict[str, Any]], list[Endpoint]]:
    """Policies and pods now; a pod without an address, or on the node's network, is nobody's peer."""
    pods = [
        Endpoint(address=item["status"]["podIP"], namespace=kubectl.namespace, labels=item["metadata"].get("labels", {}))
        for item in kubectl.items("pods")
        if item["status"].get("podIP") and not item["spec"].get("hostNetwork")
    ]
    return kubectl.items("networkpolicies"), sorted(pods, key=lambda pod: pod.address)


def _nft(commands: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=commands, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"nft: {done.stderr[-2000:]}"
