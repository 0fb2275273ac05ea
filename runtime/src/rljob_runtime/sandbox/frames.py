"""Frames between a process and the one it started, over a socket: a 4-byte little-endian length, then the body."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct

LENGTH = struct.Struct("<I")
READY, FAILED = b"R", b"F"
"""How the first frame of a process begins: it is of use, and what keeps it in follows; it is not, and why follows."""


def read_exactly(fd: int, size: int) -> bytes | None:
    """Read ``size`` bytes; None at the end of the stream."""
    pieces = []
    while size:
        piece = os.read(fd, size)
        if not piece:
            return None
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def read_frame(connection: socket.socket) -> bytes | None:
    """Return the next frame's body, None at the end of the stream."""
    head = read_exactly(connection.fileno(), LENGTH.size)
    return None if head is None else read_exactly(connection.fileno(), LENGTH.unpack(head)[0])


def send_frame(connection: socket.socket, body: bytes) -> None:
    """Send one frame, however long that takes."""
    connection.sendall(LENGTH.pack(len(body)) + body)


def end_with_parent(fd: int) -> None:
    """Wait for the parent to close its end, then end this process, whatever else runs in it, and all it started."""
    poller = select.poll()
    poller.register(fd, 0)
    poller.poll()
    end_group()


def end_group() -> None:
    """End this process and, where it leads a group of its own, all that it started."""
    if os.getpgrp() == os.getpid():
        with contextlib.suppress(PermissionError):  # where processes are denied there are no others
            os.kill(0, signal.SIGKILL)
    os._exit(0)
