"""Processes by pid and start time, so that a recycled pid is never taken for the process that had it before."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of one boot of one machine."""

    pid: int
    """Process id."""
    start_ticks: int
    """Start time in clock ticks since boot."""
    boot_id: str
    """The boot it belongs to: after a restart of the machine, pid and ticks may repeat."""

    def alive(self) -> bool:
        """Whether exactly this process still runs; a zombie does not."""
        return identify(self.pid) == self and status(self.pid) not in ("Z", "X", None)


@functools.cache
def boot_id() -> str:
    """The kernel's name for this boot."""
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the program's name, or None for a pid without process."""
    try:
        text = (PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in brackets and may itself hold brackets and spaces.
    return text.rpartition(")")[2].split()


def identify(pid: int) -> ProcessIdentity | None:
    """The process that has this pid now, or None."""
    fields = _stat(pid)
    return None if fields is None else ProcessIdentity(pid=pid, start_ticks=int(fields[19]), boot_id=boot_id())


def status(pid: int) -> str | None:
    """The kernel's one letter for the state of a process, or None for a pid without process."""
    fields = _stat(pid)
    return None if fields is None else fields[0]


def me() -> ProcessIdentity:
    """This process.

    Raises:
        RuntimeError: /proc is not mounted.
    """
    found = identify(os.getpid())
    if found is None:
        raise RuntimeError("/proc holds no entry for this process; is it mounted?")
    return found


def all_pids() -> Iterator[int]:
    """Every pid that /proc shows."""
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def with_environment(entry: str) -> list[ProcessIdentity]:
    """Processes whose environment at their start held ``entry`` (``NAME=value``) and that this user may inspect."""
    wanted = entry.encode()
    found = []
    for pid in all_pids():
        try:
            environment = (PROC / str(pid) / "environ").read_bytes()
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # gone meanwhile, or another user's: not ours in both cases
        if wanted in environment.split(b"\0"):
            identity = identify(pid)
            if identity is not None:
                found.append(identity)
    return found


def descendants(ancestors: list[ProcessIdentity]) -> list[ProcessIdentity]:
    """Every process below the given ones, themselves not included."""
    children: dict[int, list[int]] = {}
    for pid in all_pids():
        fields = _stat(pid)
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(pid)
    pending, seen = [a.pid for a in ancestors], {a.pid for a in ancestors}
    found = []
    while pending:
        for child in children.get(pending.pop(), []):
            identity = identify(child)
            if child not in seen and identity is not None:
                seen.add(child)
                pending.append(child)
                found.append(identity)
    return found
