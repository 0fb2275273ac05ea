"""Ports for process groups."""

from __future__ import annotations

import contextlib
import random
import socket

from rljob_runtime.errors import ClusterError

GROUP_PORTS = range(20_000, 28_000)
"""Above those of Ray's workers and below those that Linux gives to outgoing connections, which might take one before it is listened on."""
PORT_TRIES = 100


def group_port(host: str) -> int:
    """A port that is free on ``host``, an address of this machine.

    Raises:
        ClusterError: no free port was found.
    """
    for port in random.SystemRandom().sample(GROUP_PORTS, PORT_TRIES):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, port))
            return port
    raise ClusterError(f"none of {PORT_TRIES} ports tried from {GROUP_PORTS[0]} to {GROUP_PORTS[-1]} is free on {host}; end what uses them")
