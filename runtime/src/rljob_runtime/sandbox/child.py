"""The beginning of a process for foreign code: what its parent wants of it, its confinement, whether it is of use.

::

    parent: SandboxProcess ── setup ──> accept ──> confined ──> what is foreign is loaded ──> accepted, then frames in both directions
                                                      └──────────────┴── refuse: why it is of no use, and the end
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

from rljob_runtime.sandbox.confine import Active, Limits, confine
from rljob_runtime.sandbox.faults import one_line
from rljob_runtime.sandbox.frames import FAILED, READY, end_with_parent, read_frame, send_frame


class RefusedError(Exception):
    """The process is of no use; the text says why, for its parent."""


def main(argv: list[str], work: Callable[[socket.socket, Any], int]) -> int:
    """Run a process; returns its exit status.

    Args:
        argv: the number of its socket.
        work: takes the socket and what the parent's ``SandboxProcess`` was given as setup; raises RefusedError before it is ready.
    """
    connection = socket.socket(fileno=int(argv[0]))
    first = read_frame(connection)
    if first is None:
        return 0
    try:
        return work(connection, pickle.loads(first))
    except RefusedError as error:
        send_frame(connection, FAILED + str(error).encode(errors="replace"))
        return 1


def confined(connection: socket.socket, limits: Limits, *, watches: bool = True) -> Active:
    """Confine this process, before anything foreign is imported and before there is a second thread, which would stay outside.

    Args:
        connection: to the parent.
        limits: what it may do; its own folder may be written.
        watches: end with the parent, by a thread; False for a process that forks, which looks at the connection itself.

    Raises:
        RefusedError: this machine cannot.
    """
    try:
        active = confine(limits)
    except OSError as error:
        raise RefusedError(f"this machine has no sandbox for it: {error}; seccomp filters are needed") from error
    if watches:
        threading.Thread(target=end_with_parent, args=(connection.fileno(),), daemon=True).start()
    return active


def say_ready(connection: socket.socket, active: Active) -> None:
    """Everything is loaded; frames follow."""
    send_frame(connection, READY + str(active).encode())


def constructed(what: str, error: BaseException, own_folder: str) -> RefusedError:
    """Why something of the user's is not there."""
    return RefusedError(f"{what} could not be constructed: {one_line(error, own_folder)}")


def bound_log(max_bytes: int) -> None:
    """Begin again with what this process prints, once it is too much."""
    if os.fstat(1).st_size > max_bytes:
        os.ftruncate(1, 0)  # it is open for appending: what is printed next is its beginning
