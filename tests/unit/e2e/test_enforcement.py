"""The rules that enforce NetworkPolicies in the built cluster."""

from typing import Any

from e2e.enforcement import TABLE, rules
from tests.support.network_policy import Endpoint

POLICY: dict[str, Any] = {
    "metadata": {"name": "guard", "namespace": "team"},
    "spec": {
        "podSelector": {"matchLabels": {"job": "a"}},
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": {"matchLabels": {"job": "a"}}}]},
            {"from": [{"podSelector": {"matchLabels": {"app": "metrics"}}}], "ports": [{"port": 9464, "protocol": "TCP"}]},
        ],
    },
}
OWN = [Endpoint(address=f"198.18.0.{n}", namespace="team", labels={"job": "a"}) for n in (2, 3)]
METRICS = Endpoint(address="198.18.0.4", namespace="team", labels={"app": "metrics"})
FOREIGN = Endpoint(address="198.18.0.5", namespace="team")


def verdict(text: str, source: str, target: str, port: int) -> str:
    """What the chain of the family ip does with a first packet: its rules in order, as nft reads them."""
    chain = text.rpartition(f"table ip {TABLE} {{")[2].splitlines()
    for line in chain:
        words = line.split()
        if "tcp" not in words:
            continue
        conditions = {"saddr": source, "daddr": target, "dport": str(port)}
        found = {name: words[words.index(name) + 1] for name in conditions if name in words}
        if all(conditions[name] == value for name, value in found.items()):
            return words[-1]
    return "accept"


def test_the_first_packet_passes_where_the_policy_allows_it() -> None:
    text = rules([POLICY], [*OWN, METRICS, FOREIGN])
    target = OWN[0].address
    assert verdict(text, OWN[1].address, target, 6379) == "accept"
    assert [verdict(text, METRICS.address, target, port) for port in (9464, 9465)] == ["accept", "drop"]
    assert verdict(text, FOREIGN.address, target, 9464) == "drop"
    assert verdict(text, "198.18.0.99", target, 6379) == "drop", "a pod that is not known yet"
    assert verdict(text, FOREIGN.address, METRICS.address, 80) == "accept", "no policy selects it"


def test_every_family_is_replaced_as_a_whole() -> None:
    text = rules([], [])
    for family in ("bridge", "ip"):
        assert text.index(f"delete table {family} {TABLE}") < text.index(f"table {family} {TABLE} {{")
