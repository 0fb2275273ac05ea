"""Addresses and ports for process groups."""

from __future__ import annotations

import random
import socket

from rljob_runtime.addresses import family_of
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


def _bound(host: str) -> socket.socket:
    for port in random.SystemRandom().sample(GROUP_PORTS, PORT_TRIES):
        tried = socket.socket(family_of(host))
        try:
            tried.bind((host, port))
        except OSError:
            tried.close()
        else:
            return tried
    raise ClusterError(f"none of {PORT_TRIES} ports tried from {GROUP_PORTS[0]} to {GROUP_PORTS[-1]} is free on {host}; end what uses them")
