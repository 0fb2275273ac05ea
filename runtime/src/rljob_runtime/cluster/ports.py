"""Addresses and ports for process groups."""

from __future__ import annotations

import random
import socket

from rljob_runtime.addresses import family_of
from rljob_runtime.errors import ClusterError

GROUP_PORTS = range(20_000, 28_000)
"""Above those of Ray's workers and below those that Linux gives to outgoing connections, which might take one before it is listened on."""
PORT_TRIES = 100
MAX_HELD = 32
"""Ports that are held for groups: addresses are asked for once per group, and not every group needs the port."""
BACKLOG = 1024
"""Connections that wait to be accepted: all members of a group come at once."""


_held: dict[int, socket.socket] = {}
"""Listeners by port, the oldest first."""


def group_port(host: str) -> int:
    """A port that is free on ``host``, an address of this machine; another process may take it before it is listened on.

    Raises:
        ClusterError: no free port was found.
    """
    with _bound(host) as probe:
        return int(probe.getsockname()[1])


def held_port(host: str) -> int:
    """A port of ``host``, an address of this machine, on which this process listens until :func:`take_listener` gets it, or many others.

    Raises:
        ClusterError: no free port was found.
    """
    listener = listening(host)
    port = int(listener.getsockname()[1])
    _held[port] = listener
    while len(_held) > MAX_HELD:
        _held.pop(next(iter(_held))).close()
    return port


def take_listener(port: int) -> socket.socket | None:
    """The socket of :func:`held_port`, whose next owner closes it; None if this process does not hold it."""
    return _held.pop(port, None)


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
