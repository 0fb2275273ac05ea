"""Ports that are chosen and listened on at once."""

from __future__ import annotations

import random
import socket

import pytest

from rljob_runtime.cluster.ports import GROUP_PORTS, address_family, in_url, listening, own_address
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


@pytest.mark.parametrize(
    ("routes", "expected"),
    [
        ({socket.AF_INET: "10.0.0.7", socket.AF_INET6: "fd00::7"}, "10.0.0.7"),
        ({socket.AF_INET6: "fd00::7"}, "fd00::7"),  # a cluster of IPv6 alone
        ({}, "127.0.0.1"),
    ],
)
def test_the_address_that_others_reach(monkeypatch: pytest.MonkeyPatch, routes: dict[socket.AddressFamily, str], expected: str) -> None:
    class Probe:
        """A datagram socket of a machine with these routes."""

        def __init__(self, family: socket.AddressFamily, kind: socket.SocketKind) -> None:
            self._family = family

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def connect(self, address: tuple[str, int]) -> None:
            if self._family not in routes:
                raise OSError(101, "Network is unreachable")

        def getsockname(self) -> tuple[str, int]:
            return routes[self._family], 0

    monkeypatch.setattr(socket, "socket", Probe)
    assert own_address() == expected
