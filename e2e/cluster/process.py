"""Starts programs that stay, waits until they are ready, stops them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.procfs import ProcessIdentity, identify
from e2e.cluster.state import ProcessRecord, StateFolder
from e2e.cluster.wait import Check, wait_until

TOKEN_VARIABLE = "RLJOB_E2E_TOKEN"

_POLL_S = 0.05
_LOG_TAIL_LINES = 15
_LOG_TAIL_BYTES = 64 * 1024
_GO_COLLECTS = {"GOGC": "300"}
"""Of Go programs, which all of them are: with its default of 100 a quarter of what the API server computes is garbage collection."""
FIRST = -10
"""Niceness of what has a machine of its own in other clusters, or answers for this node; and that of its autogroup (sched(7)): where the
kernel has these, a process's niceness counts within its session alone."""
_PROXY_VARIABLES = {"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"}

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Started by this very process, which has to reap them when they end."""


def start(folder: StateFolder, name: str, argv: Sequence[str | Path], *, first: bool = False) -> ProcessRecord:
    """Start a program in the background with a log of its own, and write down which process it is.

    It gets a session of its own (a Ctrl-C in the terminal is not for it), and no proxy: everything it talks to is on this machine.

    Args:
        folder: the cluster it belongs to; also its working directory.
        name: what to call it; unique in the cluster.
        argv: program and arguments.
        first: whether it runs before what else wants a core, if this process may set that. Where it does not, an API server without
            an answer for half a minute costs the node, while pods import on all cores.

    Raises:
        ClusterError: the program cannot be started.
    """
    state = folder.require()
    environment = {key: value for key, value in os.environ.items() if key.upper() not in _PROXY_VARIABLES and key != "KUBECONFIG"}
    environment.update({**_GO_COLLECTS, TOKEN_VARIABLE: state.token})
    with folder.log(name).open("ab") as log, _niceness(FIRST) if first else contextlib.nullcontext():
        try:
            child = subprocess.Popen(
                [str(part) for part in argv],
                cwd=folder.path, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ClusterError(f"{name}: cannot start {argv[0]}: {error.strerror}") from error
    if first:
        with contextlib.suppress(OSError):  # no autogroups, or they are root's
            Path(f"/proc/{child.pid}/autogroup").write_text(str(FIRST))
    identity = identify(child.pid)
    if identity is None:  # not reaped yet, so it has an entry
        raise ClusterError(f"{name}: process {child.pid} has no entry in /proc")
    record = ProcessRecord(name=name, identity=identity)
    folder.update(processes=(*state.processes, record))
    _children[child.pid] = child
    return record


@contextlib.contextmanager
def _niceness(value: int) -> Iterator[None]:
    """What this process starts inside the block inherits it; nothing changes where that is not permitted."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, value)
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, own)


def wait_ready(what: str, check: Check, *, deadline_s: float, folder: StateFolder, record: ProcessRecord) -> None:
    """Wait until a program that was started is ready.

    Args:
        what: the thing waited for, as it should read in a message.
        check: returns None when ready, else why not yet.
        deadline_s: limit in seconds.
        folder: the cluster, for its logs.
        record: the process, which has to live meanwhile.

    Raises:
        ClusterError: the process ended, or the deadline passed; with the end of its log.
    """

    def alive_and_ready() -> str | None:
        if not record.identity.alive():
            raise ClusterError(f"{record.name} ended while waiting for {what}.")
        return check()

    try:
        wait_until(what, alive_and_ready, deadline_s=deadline_s)
    except ClusterError as error:
        raise ClusterError(f"{error}\n{log_tail(folder.log(record.name))}") from error


def log_tail(path: Path, lines: int = _LOG_TAIL_LINES) -> str:
    """The last lines of a log under a heading that names it."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - _LOG_TAIL_BYTES))
            last = deque(log.read().decode(errors="replace").splitlines(), maxlen=lines)
    except FileNotFoundError:
        return f"{path}: no such log"
    return "\n".join([f"last lines of {path}:", *(f"  {line[:400]}" for line in last)])


def stop(processes: Iterable[ProcessIdentity], *, grace_s: float) -> list[ProcessIdentity]:
    """Ask processes to end, end those that do not within ``grace_s``, and wait until all are gone.

    Only exactly these processes get a signal: a pid that meanwhile belongs to another one is left alone.

    Returns:
        Those that were alive.

    Raises:
        ClusterError: one outlives SIGKILL.
    """
    alive = [process for process in processes if process.alive()]
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        remaining = [process for process in alive if process.alive()]
        for process in remaining:
            _signal(process, number)
        if _all_gone(remaining, deadline_s=limit_s):
            return alive
    stuck = ", ".join(str(process.pid) for process in alive if process.alive())
    raise ClusterError(f"processes {stuck} are still there 10 s after SIGKILL; they hang in the kernel. Remedy: see /proc/PID/stack")


def _signal(process: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to this process and no other, even if it ends between the check and the signal."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if process.alive():  # checked after the handle is held: the handle cannot change owner any more
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def _all_gone(processes: list[ProcessIdentity], *, deadline_s: float) -> bool:
    end_s = time.monotonic() + deadline_s
    while True:
        for pid, child in list(_children.items()):
            if child.poll() is not None:
                del _children[pid]
        if not any(process.alive() for process in processes):
            return True
        if time.monotonic() > end_s:
            return False
        time.sleep(_POLL_S)
