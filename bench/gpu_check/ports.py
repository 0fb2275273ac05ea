"""Free ports of this machine."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

PORTS = range(20_000, 28_000)
"""Below those that Linux gives to outgoing connections, one of which could take a port before it is listened on."""


def free_ports(count: int) -> list[int]:
    """So many different ones, free at the moment.

    Raises:
        OSError: there are not so many.
    """
    found: list[int] = []
    with ExitStack() as stack:
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                return found
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    raise OSError(f"{count} free ports were asked for; {len(found)} of {PORTS[0]} to {PORTS[-1]} are free")
