"""Addresses of hosts, IPv4 and IPv6, as sockets and URLs have them."""

from __future__ import annotations

import socket

OUTSIDE = ((socket.AF_INET, "192.0.2.1", "127.0.0.1"), (socket.AF_INET6, "2001:db8::1", "::1"))
"""By family, in Ray's order (``node_ip_address_from_perspective``): an address for documentation, which no host has, and the loopback."""


def own_address() -> str:
    """The address other nodes reach this one by: the source address of the default route, IPv4 where there is one; else a loopback."""
    for family, outside, _ in OUTSIDE:
        if (found := source_address(family, outside)) is not None:
            return found
    return next((loopback for family, _, loopback in OUTSIDE if source_address(family, loopback) is not None), OUTSIDE[0][2])


def source_address(family: socket.AddressFamily, target: str) -> str | None:
    """Where datagrams to an address would come from; none is sent. None: there is no way to it."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def family_of(host: str) -> socket.AddressFamily:
    """Of sockets for an address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def host_and_port(host: str, port: int | str) -> str:
    """``127.0.0.1:80`` and ``[::1]:80``, as in a URL."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
