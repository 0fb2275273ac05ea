"""Ports that are chosen and listened on at once."""

from __future__ import annotations

import random
import socket

import pytest

from rljob_runtime.cluster.ports import GROUP_PORTS, address_family, in_url, listening
from rljob_runtime.errors import ClusterError

HERE = "127.0.0.1"


def test_two_sockets_never_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both try the same ports in the same order."""
    order = random.Random(5).sample(GROUP_PORTS, 20)
    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: order)
    with listening(HERE) as first, listening(HERE) as second:
        ports = [made.getsockname()[1] for made in (first, second)]
        assert ports[0] != ports[1]
        assert set(ports) <= set(order)
        for port in ports:
            with socket.create_connection((HERE, port)):
                pass


def test_where_no_port_is_free_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening(HERE) as taken:
        monkeypatch.setattr(random.SystemRandom, "sample", lambda self, ports, count: [taken.getsockname()[1]])
        with pytest.raises(ClusterError, match=f"from 20000 to 27999 is free on {HERE}"):
            listening(HERE)


@pytest.mark.parametrize(
    ("host", "family", "written"),
    [
        ("10.0.0.7", socket.AF_INET, "10.0.0.7"),
        ("node-1.cluster", socket.AF_INET, "node-1.cluster"),
        ("fd00::7", socket.AF_INET6, "[fd00::7]"),
    ],
)
def test_addresses_of_both_families(host: str, family: socket.AddressFamily, written: str) -> None:
    assert address_family(host) is family
    assert in_url(host) == written
