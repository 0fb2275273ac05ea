"""What a NetworkPolicy lets through, by the published semantics of networking.k8s.io/v1; for tests of the policies that are rendered.

A stand-in for a network plug-in that enforces policies, strict: a field that it does not know is an error. Source:
https://kubernetes.io/docs/concepts/services-networking/network-policies/ and the API's field descriptions.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Policy = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A pod, or with no namespace an address outside the pods' network."""

    address: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def allows(policies: Sequence[Policy], source: Endpoint, target: Endpoint, port: int, protocol: str = "TCP") -> bool:
    """Whether a connection is let through: both the source's egress and the target's ingress have to allow it."""
    return _direction_allows(policies, "Egress", source, target, port, protocol) and _direction_allows(
        policies, "Ingress", target, source, port, protocol
    )


def _direction_allows(policies: Sequence[Policy], direction: str, of: Endpoint, peer: Endpoint, port: int, protocol: str) -> bool:
    """A pod that no policy selects for a direction is open; else one rule of one policy has to match."""
    selecting = [policy for policy in policies if _selects(policy, of, direction)]
    peers = "to" if direction == "Egress" else "from"
    rules = [(policy["metadata"]["namespace"], rule) for policy in selecting for rule in policy["spec"].get(direction.lower()) or ()]
    return not selecting or any(_rule_matches(rule, peers, namespace, peer, port, protocol) for namespace, rule in rules)


def _selects(policy: Policy, pod: Endpoint, direction: str) -> bool:
    _only(policy["spec"], {"podSelector", "policyTypes", "ingress", "egress"})
    types = policy["spec"].get("policyTypes") or ["Ingress", *(["Egress"] if policy["spec"].get("egress") else [])]
    is_here = pod.namespace != "" and pod.namespace == policy["metadata"]["namespace"]
    return is_here and direction in types and _labels_match(policy["spec"]["podSelector"], pod.labels)


def _rule_matches(rule: Mapping[str, Any], peers: str, namespace: str, peer: Endpoint, port: int, protocol: str) -> bool:
    """An absent or empty list of peers or ports matches all of them."""
    _only(rule, {peers, "ports"})
    is_peer = not rule.get(peers) or any(_peer_matches(entry, namespace, peer) for entry in rule[peers])
    return is_peer and (not rule.get("ports") or any(_port_matches(entry, port, protocol) for entry in rule["ports"]))


def _peer_matches(entry: Mapping[str, Any], namespace: str, peer: Endpoint) -> bool:
    _only(entry, {"podSelector", "namespaceSelector", "ipBlock"})
    if "ipBlock" in entry:
        if set(entry) != {"ipBlock"}:
            raise ValueError(f"ipBlock beside selectors in one peer: {entry}")
        _only(entry["ipBlock"], {"cidr", "except"})
        address = ipaddress.ip_address(peer.address)
        excepted = any(address in ipaddress.ip_network(cidr) for cidr in entry["ipBlock"].get("except", ()))
        return address in ipaddress.ip_network(entry["ipBlock"]["cidr"]) and not excepted
    if not entry:
        raise ValueError("a peer without podSelector, namespaceSelector and ipBlock")
    if not peer.namespace:
        return False
    if "namespaceSelector" in entry:
        # Kubernetes gives each namespace this label; the tests' namespaces have no others.
        is_namespace = _labels_match(entry["namespaceSelector"], {"kubernetes.io/metadata.name": peer.namespace})
    else:
        is_namespace = peer.namespace == namespace
    return is_namespace and _labels_match(entry.get("podSelector", {}), peer.labels)


def _port_matches(entry: Mapping[str, Any], port: int, protocol: str) -> bool:
    _only(entry, {"port", "endPort", "protocol"})
    if entry.get("protocol", "TCP") != protocol:
        return False
    if "port" not in entry:
        return True
    if not isinstance(entry["port"], int):
        raise TypeError(f"named ports are not known here: {entry}")
    return bool(entry["port"] <= port <= entry.get("endPort", entry["port"]))


def _labels_match(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    _only(selector, {"matchLabels"})
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def _only(section: Mapping[str, Any], known: Iterable[str]) -> None:
    if unknown := set(section) - set(known):
        raise ValueError(f"not part of what is known of NetworkPolicies here: {', '.join(sorted(unknown))} in {section}")
