"""In place of Ray's agent of runtime environments, which imports Ray for a second: makes those of variables alone, all that forks need.

``python -I -S environments.py IDLE_AGENT AGENT [ARGUMENTS]``; see ``rljob_runtime.cluster.idle_agent``, whose path the first argument is.
Requests and answers are HTTP with messages of ``runtime_env_agent.proto``, of which field 1 of a request is the environment as JSON, and
field 3 of the answer what :mod:`.launcher` is given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import sys
from typing import Any

VARIABLES = "env_vars"
ANSWERS_IN_S = 10.0


def main() -> None:
    """Until the raylet ends."""
    idle_agent = _module(sys.argv[1])
    given = idle_agent.options(sys.argv[2:])
    with idle_agent.bound(given["node-ip-address"], 0) as listening:
        listening.listen()
        idle_agent.write_port(given, idle_agent.RUNTIME_ENV_PORT, listening.getsockname()[1])
        while idle_agent.wait(int(os.environ["RAY_RAYLET_PID"]), listening):
            connection, _ = listening.accept()
            # A raylet that gives a request up repeats it, and would end with its agent.
            with connection, contextlib.suppress(ConnectionError, TimeoutError):
                connection.settimeout(ANSWERS_IN_S)
                _answer(connection)


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("idle_agent", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _answer(connection: socket.socket) -> None:
    with connection.makefile("rb") as request:
        if not (first := request.readline()):
            return  # nothing was asked
        path = first.split()[1]
        length = 0
        while header := request.readline().strip():
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = request.read(length)
    reply = _created(body) if path == b"/get_or_create_runtime_env" else b""  # nothing, which is success, for what is no longer used
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: {len(reply)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + reply)


def _created(request: bytes) -> bytes:
    environment = json.loads(_first_field(request))
    if environment.keys() != {VARIABLES}:
        return b"\x08\x01" + _field(2, f"tests fork workers of {VARIABLES} alone, and this one asks for {sorted(environment)}".encode())
    return _field(3, json.dumps({VARIABLES: environment[VARIABLES], "py_executable": sys.executable}).encode())


def _first_field(message: bytes) -> bytes:
    """Field 1 of a message that begins with it, length-delimited."""
    assert message[0] == 0x0A, "field 1, length-delimited"
    size, place, shift = 0, 1, 0
    while True:
        byte = message[place]
        size, place, shift = size | (byte & 0x7F) << shift, place + 1, shift + 7
        if byte < 0x80:
            return message[place : place + size]


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field as protobuf encodes it, with a varint for the length."""
    size, rest = bytearray(), len(content)
    while rest > 0x7F:
        size.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([number << 3 | 2]) + bytes(size) + bytes([rest]) + content


if __name__ == "__main__":
    main()
