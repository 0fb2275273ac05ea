"""The network of a confined program: TCP connections to one port, by no other way and to no other place."""

import socket
import subprocess
import sys

from tests.support.kernel import needs_tcp_rules
from tests.support.pace import HANG_S

SCRIPT = """
import socket, sys
from rljob_runtime.sandbox import Limits, confine

allowed, other = int(sys.argv[1]), int(sys.argv[2])
FAST_OPEN, MPTCP = 0x20000000, 262
confine(Limits(connect_port=allowed, processes=True))


def at(port):
    return ("127.0.0.1", port)


WAYS = {
    "allowed": lambda: socket.create_connection(at(allowed)).close(),
    "other": lambda: socket.create_connection(at(other)).close(),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "unix": lambda: socket.socket(socket.AF_UNIX),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "mptcp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, MPTCP),
    "tcp6": lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP).close(),
    "pair": lambda: socket.socketpair(),
    "sendto": lambda: socket.socket().sendto(b"x", FAST_OPEN, at(other)),
    "sendmsg": lambda: socket.socket().sendmsg([b"x"], [], FAST_OPEN, at(other)),
    "bind": lambda: socket.create_server(at(0)),
}
for name, way in WAYS.items():
    try:
        way()
        print(name)
    except OSError:
        pass
"""


@needs_tcp_rules
def test_a_program_reaches_one_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as allowed, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [str(server.getsockname()[1]) for server in (allowed, other)]
        done = subprocess.run([sys.executable, "-c", SCRIPT, *ports], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert set(done.stdout.split()) == {"allowed", "tcp6", "pair"}
