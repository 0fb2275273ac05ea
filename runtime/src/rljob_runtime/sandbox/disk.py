"""What foreign code has written, and the end of a process that fills the disk.

The kernel limits the size of one file; their sum it limits by quotas, which need privileges. So the parent looks: files in the process's
folder, and files without a name that a process of its session still holds open. Between two looks a process can write more than its
limit, and files that are mapped and closed are not seen, which its address space bounds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
_BLOCK_BYTES = 512
"""Unit of ``st_blocks`` (stat(2))."""
_ENTRY_BYTES = 4096
"""What the smallest file counts, an empty one too: a disk also runs out of inodes."""


def used_bytes(folder: str, stop_at_bytes: float = float("inf")) -> int:
    """Disk space below ``folder``; counting ends above ``stop_at_bytes``. What vanishes or cannot be read meanwhile counts nothing."""
    used, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        used += max(_ENTRY_BYTES, entry.stat(follow_symlinks=False).st_blocks * _BLOCK_BYTES)
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                    if used > stop_at_bytes:
                        return used
        except OSError as error:
            _log.debug("not counted: %s", error)
    return used


def nameless_bytes(session: int) -> int:
    """Disk space of files that were removed, or never had a name, and are open in a process of the session."""
    found: dict[tuple[int, int], int] = {}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if os.getsid(pid) != session:
                continue
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        found[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return sum(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A process that leads a session of its own."""

    pid: int
    folder: Path
    """The only one it writes in."""
    limit_bytes: int
    too_much: Callable[[int], None]
    """Called with what it has written, at most once, and never after ``DiskWatch.forget``."""


class DiskWatch:
    """Looks at all sandboxed processes of this one, in a thread that lives as long as there are any."""

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self._lock = threading.Lock()
        self._watched: dict[int, Watched] = {}
        self._runs = False

    def add(self, watched: Watched) -> None:
        """Watch a process."""
        with self._lock:
            self._watched[watched.pid] = watched
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._look, name="sandbox-disk", daemon=True).start()

    def forget(self, pid: int) -> None:
        """No longer watch a process; when this returns, nothing is done to it."""
        with self._lock:
            self._watched.pop(pid, None)

    def _look(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                if not self._watched:
                    self._runs = False
                    return
                all_watched = list(self._watched.values())
            for watched in all_watched:
                used = used_bytes(str(watched.folder), watched.limit_bytes)
                if used <= watched.limit_bytes:
                    used += nameless_bytes(watched.pid)
                if used > watched.limit_bytes:
                    self._end(watched, used)
            pause.wait(LOOK_EVERY_S)

    def _end(self, watched: Watched, used: int) -> None:
        with self._lock:
            if self._watched.get(watched.pid) is watched:
                del self._watched[watched.pid]
                watched.too_much(used)
