"""Processes and networks of pods, from the node that runs them: as root on the machine of :mod:`e2e.cluster`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.procfs import PROC, all_pids
from e2e.cluster.state import StateFolder

NFT_TABLE = "inet rljob_chaos"
CUT = f"""
table {NFT_TABLE} {{
  chain incoming {{ type filter hook input priority 0; policy drop; iif lo accept; }}
  chain outgoing {{ type filter hook output priority 0; policy drop; oif lo accept; }}
}}
"""
"""Rules of a pod whose packets are dropped in both directions without a reply, as when a cable is pulled."""
TIMEOUT_S = 30.0


class NotRunning(RuntimeError):
    """Raised when a pod has no such process."""


def processes(pod_uid: str) -> list[int]:
    """Pids, on the node, of all processes in the containers of a pod."""
    found = []
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if pod_uid in (PROC / str(pid) / "cgroup").read_text():
                found.append(pid)
    return found


def with_command(pod_uid: str, part: str) -> int:
    """Pid, on the node, of the pod's youngest process whose command line has ``part``: the shell that started it may have it too.

    Raises:
        NotRunning: there is none.
    """
    for pid in sorted(processes(pod_uid), reverse=True):
        with contextlib.suppress(OSError):
            if part in (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                return pid
    raise NotRunning(f"no process of pod {pod_uid} has {part!r} in its command line")


def numbered(pod_uid: str, inner_pid: int) -> int:
    """Pid, on the node, of the process that has a certain pid inside its container.

    Raises:
        NotRunning: there is none.
    """
    for pid in processes(pod_uid):
        with contextlib.suppress(OSError):
            lines = (PROC / str(pid) / "status").read_text().splitlines()
            numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
            if len(numbers) > 1 and int(numbers[-1]) == inner_pid:
                return pid
    raise NotRunning(f"pod {pod_uid} has no process {inner_pid}")


def cut(pod_uid: str) -> int:
    """Cut a pod off the network. Returns the process through which :func:`reconnect` finds it."""
    pid = min(processes(pod_uid), default=None)
    if pid is None:
        raise NotRunning(f"pod {pod_uid} has no process")
    _nft(pid, "-f", "-", text=CUT)
    return pid


def reconnect(pid: int) -> None:
    """Undo :func:`cut`."""
    _nft(pid, "delete", "table", *NFT_TABLE.split())


def _nft(pid: int, *arguments: str, text: str | None = None) -> None:
    subprocess.run(["nsenter", "-t", str(pid), "-n", "nft", *arguments], input=text, text=True, check=True, timeout=TIMEOUT_S)


@contextlib.contextmanager
def stopped(cluster: Path, program: str) -> Iterator[None]:
    """One program of the control plane or the node stands still within.

    Raises:
        NotRunning: it does not run.
    """
    records = StateFolder(path=cluster).require().processes
    found = [record.identity for record in records if record.name == program and record.identity.alive()]
    if len(found) != 1:
        raise NotRunning(f"{program} does not run; there are {', '.join(record.name for record in records)}")
    os.kill(found[0].pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(found[0].pid, signal.SIGCONT)


def stop_for(cluster: Path, program: str, seconds: float) -> None:
    """Let one program of the control plane or the node stand still for a while."""
    with stopped(cluster, program):
        time.sleep(seconds)
