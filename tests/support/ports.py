"""TCP ports that nothing listens on."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """Different free ports of the loopback interface."""
    with ExitStack() as probes:
        bound = [probes.enter_context(socket.socket()) for _ in range(count)]
        for probe in bound:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in bound]


def free_port() -> int:
    """A free port of the loopback interface."""
    return free_ports(1)[0]
