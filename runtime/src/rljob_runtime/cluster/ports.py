"""Addresses and ports for process groups."""

from __future__ import annotations

import random
import socket

from rljob_runtime.errors import ClusterError

GROUP_PORTS = range(20_000, 28_000)
"""Above those of Ray's workers and below those that Linux gives to outgoing connections, which might take one before it is listened on."""
PORT_TRIES = 100
BACKLOG = 1024
"""Connections that wait to be accepted: all members of a group come at once."""


def group_port(host: str) -> int:
    """A port that is free on ``host``, an address of this machine; another process may take it before it is listened on.

    Raises:
        ClusterError: no free port was found.
    """
    with _bound(host) as probe:
        return int(probe.getsockname()[1])


def listening(host: str) -> socket.socket:
    """A socket that listens on ``host``, an address of this machine: nobody else can take its port.

    Raises:
        ClusterError: no free port was found.
    """
    listener = _bound(host)
    listener.listen(BACKLOG)
    return listener


def address_family(host: str) -> socket.AddressFamily:
    """Of an address, or of a name that has one of IPv4."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def in_url(host: str) -> str:
    """An address as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def own_address() -> str:
    """The address other nodes reach this one by: the source address of the default route, IPv4 before IPv6; loopback without a network."""
    for address in ("192.0.2.1", "2001:db8::1"):  # documentation ranges: nothing is sent by a datagram connect
        with socket.socket(address_family(address), socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _bound(host: str) -> socket.socket:
    for port in random.SystemRandom().sample(GROUP_PORTS, PORT_TRIES):
        tried = socket.socket(address_family(host))
        try:
            tried.bind((host, port))
        except OSError:
            tried.close()
        else:
            return tried
    raise ClusterError(f"none of {PORT_TRIES} ports tried from {GROUP_PORTS[0]} to {GROUP_PORTS[-1]} is free on {host}; end what uses them")
