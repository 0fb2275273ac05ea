"""What Ray's node starts instead of its ``setup_worker.py``, with the same arguments; see the package. Servers' processes likewise.

Runs as a script with the interpreter's own path only, so that it costs some ten milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NoReturn

HERE = os.path.dirname(os.path.abspath(__file__))
PATIENCE_S = 300.0
"""Until there is a fork; the first one of a preloaded process waits for its imports."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SOCKET = "RLJOB_TESTS_FORK_SOCKET"
WORKER = "RLJOB_TESTS_FORK_WORKER"
CONTEXT = "--serialized-runtime-env-context="
"""The option for what Ray's agent of runtime environments answers."""
LANGUAGE = "--language="
FORK = "fork-"
"""What a launcher's process is called, before its fork's id."""
PR_SET_NAME = 15
SPAWNED = "--multiprocessing-fork"
"""The last argument of what multiprocessing spawns, which is given the numbers of open files that it has (:mod:`.spawned`)."""


def launching(worker: Mapping[str, Any], *arguments: str) -> list[str]:
    """What an interpreter runs, after itself, to be a fork that runs ``arguments`` (see ``WORKER`` in the package)."""
    context = json.dumps({"env_vars": {WORKER: json.dumps(worker)}})
    return [os.path.join(HERE, "launcher.py"), f"{CONTEXT}{context}", *arguments]


def spawning(worker: Mapping[str, Any]) -> Callable[..., list[str]]:
    """In the place of ``multiprocessing.spawn.get_command_line``: what is spawned is a fork of a process for ``worker``."""

    def command_line(**numbers: int) -> list[str]:
        given = [f"{name}={number}" for name, number in numbers.items()]
        return [sys.executable, *launching(worker, os.path.join(HERE, "spawned.py"), *given, SPAWNED)]

    return command_line


def main() -> NoReturn:
    """Be a forked worker, or the ordinary one."""
    context = json.loads(_last(CONTEXT) or "{}")
    arguments = [a for a in sys.argv[1:] if not a.startswith((CONTEXT, LANGUAGE))]
    worker = json.loads((context.get("env_vars") or {}).pop(WORKER, "null"))
    python = context.pop("py_executable", None) or sys.executable
    if any(context.values()) or python != sys.executable:
        _rays_own()
    if worker is None or SOCKET not in os.environ:
        os.execv(sys.executable, [sys.executable, *arguments])
    try:
        server, pid = _forked(worker, arguments)
    except OSError:
        pid = None
    if pid is None:
        os.execv(sys.executable, [sys.executable, *arguments])
    _follow(server, pid)


def _last(beginning: str) -> str:
    return next((a.removeprefix(beginning) for a in reversed(sys.argv) if a.startswith(beginning)), "")


def _rays_own() -> NoReturn:
    """For a runtime environment that asks for more than variables."""
    from importlib.util import find_spec

    sys.path = [place for place in sys.path if place != HERE]
    ray = find_spec("ray")  # is not imported by this
    assert ray is not None
    assert ray.origin is not None
    script = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])


def _forked(worker: dict[str, Any], arguments: list[str]) -> tuple[socket.socket, int | None]:
    """The connection that lives as long as the fork, and the fork's process id; None: this worker gets none."""
    import messages

    files = [0, 1, 2, *(_inherited() if arguments[-1] == SPAWNED else ())]
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.settimeout(PATIENCE_S)
    server.connect(os.environ[SOCKET])
    request = {
        "worker": worker,
        "interpreter": sys.executable,
        "argv": arguments,
        "files": files,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "oom_score_adj": _oom_score_adj(),
        "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
        "ignored": [int(s) for s in FORWARDED if signal.getsignal(s) is signal.SIG_IGN],
    }
    messages.send(server, request, files)
    answer, _ = messages.receive(server)
    return server, answer["pid"] if answer else None


def _inherited() -> list[int]:
    """Open files that the process which started this one passed on to it, besides the standard ones."""
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return [n for n in numbers if n > 2 and _is_inherited(n)]


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)  # what Python opens itself is not
    except OSError:
        return False  # the folder that was read


def _oom_score_adj() -> str:
    """Ray's workers are what a machine without memory should end first."""
    with open("/proc/self/oom_score_adj") as file:
        return file.read()


def _follow(server: socket.socket, pid: int) -> NoReturn:
    """Pass signals on until the fork ends, then end as it did."""

    def forward(number: int, _: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    import messages

    ctypes.CDLL(None).prctl(PR_SET_NAME, f"{FORK}{pid}".encode(), 0, 0, 0)  # by which tests find it
    server.settimeout(None)
    if sys.argv[-1] == SPAWNED:  # ends with its parent, as whoever spawns wants it to
        parent = os.pidfd_open(os.getppid())
        if parent in select.select([server, parent], [], [])[0]:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        answer, _ = messages.receive(server)
    except OSError:
        answer = None
    status = answer["status"] if answer else -signal.SIGKILL  # the preloaded process died, and its forks with it
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the fork may have left one
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(max(status, 1) if status < 0 else status)


if __name__ == "__main__":
    main()
