"""TCP ports that nothing listens on, and that nothing else is given before the test listens there."""

import fcntl
import socket
import tempfile
from pathlib import Path

import pytest

PORTS = range(28_000, 32_768)
"""Between those of process groups (``cluster/ports.py``) and those the kernel gives to whoever asks for any."""


def free_port() -> int:
    """A free port of the loopback interface; processes of this machine take turns, so none gets a port that another is about to use."""
    with (Path(tempfile.gettempdir()) / "rljob-tests-next-port").open("a+") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX)
        turns.seek(0)
        turn = int(turns.read() or 0)
        for tried in range(len(PORTS)):
            port = PORTS[(turn + tried) % len(PORTS)]
            if _is_free(port):
                turns.truncate(0)
                turns.write(str(turn + tried + 1))
                return port
    raise OSError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")


def free_ports(count: int) -> list[int]:
    """Different free ports of the loopback interface."""
    return [free_port() for _ in range(count)]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _has_ipv6() -> bool:
    """By the kernel's list of addresses: a machine that has ``::1`` runs the tests, and binding that fails there is a failure."""
    try:
        return f"{1:032x} " in Path("/proc/net/if_inet6").read_text()
    except FileNotFoundError:  # the kernel has no IPv6
        return False


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no address ::1")
