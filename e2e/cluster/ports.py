"""Free ports on the loopback interface."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

from e2e.cluster.errors import ClusterError

RANGE = range(20000, 30000)
"""Below the kernel's range for outgoing connections, so that nothing takes a port between the choice and its use by chance."""

_ATTEMPTS = 1000


def choose(names: Iterable[str], *, address: str = "127.0.0.1") -> dict[str, int]:
    """A free port for each name, all different.

    Random, so that clusters which start at the same time choose different ones. A clash would be seen at once: the program fails to bind.

    Raises:
        ClusterError: no free port was found.
    """
    chosen: dict[str, int] = {}
    for name in names:
        for _ in range(_ATTEMPTS):
            port = random.choice(RANGE)
            if port not in chosen.values() and _is_free(address, port):
                chosen[name] = port
                break
        else:
            raise ClusterError(f"no free port for {name} in {RANGE.start}-{RANGE.stop - 1} on {address} after {_ATTEMPTS} attempts")
    return chosen


def _is_free(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
