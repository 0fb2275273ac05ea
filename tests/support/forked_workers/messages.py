"""One message with open files, over a local socket that keeps messages apart; only the standard library, and little of it."""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_BYTES = 160_000
"""Below what the kernel takes in one message; an environment is a tenth of it."""


def send(to: socket.socket, message: Any, files: list[int] | None = None) -> None:
    """Raises OSError: the other side is gone, or the message is too long."""
    socket.send_fds(to, [json.dumps(message).encode()], files or [])


def receive(of: socket.socket, max_files: int = 64) -> tuple[Any, list[int]]:
    """The next message and its files; ``(None, [])`` when the other side has closed."""
    data, files, _, _ = socket.recv_fds(of, MAX_BYTES, max_files)
    return (json.loads(data), files) if data else (None, [])
