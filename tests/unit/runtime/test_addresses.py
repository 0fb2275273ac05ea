"""Addresses of this host and of others, IPv4 and IPv6."""

from __future__ import annotations

import pytest
from torch.distributed import rendezvous

from rljob_runtime import addresses
from rljob_runtime.addresses import host_and_port, own_address
from rljob_runtime.cluster.ports import group_port
from tests.support.ports import needs_ipv6


@pytest.mark.parametrize(
    ("ways", "found"),
    [
        ({"192.0.2.1": "10.0.0.5", "2001:db8::1": "fd00::5"}, "10.0.0.5"),
        ({"2001:db8::1": "fd00::5", "127.0.0.1": "127.0.0.1", "::1": "::1"}, "fd00::5"),
        ({"127.0.0.1": "127.0.0.1", "::1": "::1"}, "127.0.0.1"),
        ({"::1": "::1"}, "::1"),
        ({}, "127.0.0.1"),
    ],
    ids=["both", "ipv6", "no-network", "ipv6-loopback", "nothing"],
)
def test_a_host_is_reached_by_ipv4_where_it_has_it(ways: dict[str, str], found: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(addresses, "source_address", lambda family, target: ways.get(target))
    assert own_address() == found


def test_only_ipv6_is_in_brackets():
    assert [host_and_port(host, 80) for host in ("::1", "10.0.0.5", "head")] == ["[::1]:80", "10.0.0.5:80", "head:80"]


@needs_ipv6
def test_groups_meet_over_ipv6():
    """As trainer ranks do, which get address and port of the first one."""
    store, rank, size = next(rendezvous(f"tcp://{host_and_port('::1', group_port('::1'))}", rank=0, world_size=1))
    store.set("key", "value")
    assert (store.get("key"), rank, size) == (b"value", 0, 1)
