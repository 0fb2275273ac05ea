"""Which processes of a job run in this pod: a file each, so that the pod's stop hook can find and await them; and whether it has begun.

Written by the driver and by worker processes, read by :mod:`rljob_runtime.entry.pre_stop`. Imports next to nothing, because that hook
must be quick. A process is known by its id together with its start time: ids are used again.
"""

from __future__ import annotations

import os
from pathlib import Path

STATE_FOLDER = Path("/tmp/rljob")
"""Writable in every pod, gone with it."""


def driver_file(state_folder: Path) -> Path:
    """The driver's file."""
    return state_folder / "driver.pid"


def worker_file(state_folder: Path, name: str) -> Path:
    """The file of a worker."""
    return state_folder / "workers" / f"{name}.pid"


def worker_files(state_folder: Path) -> list[Path]:
    """The files of all workers that ran here, in order of their names."""
    return sorted((state_folder / "workers").glob("*.pid"))


def stopping_file(state_folder: Path) -> Path:
    """Is there once the pod has been asked to end."""
    return state_folder / "stopping"


def write(path: Path) -> None:
    """Write this process's file.

    Raises:
        OSError: the folder is not writable.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    pid = os.getpid()
    path.write_text(f"{pid} {_start_ticks(pid)}\n")


def running(path: Path) -> int | None:
    """Process id in the file when that very process still runs, else None."""
    try:
        pid, ticks = (int(word) for word in path.read_text().split())
    except (OSError, ValueError):
        return None
    return pid if _start_ticks(pid) == ticks else None


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when it is gone, or ended and not yet collected by its parent."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else int(fields[19])
