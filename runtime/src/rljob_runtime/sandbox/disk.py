"""What foreign code has written, and the end of a process that fills the disk.

The kernel limits the size of one file; their sum it limits by quotas, which need privileges. So the parent looks: files in the process's
folder, and files without a name that a process of its session still holds open. Between two looks a process can write more than its
limit, and files that are mapped and closed are not seen, which its address space bounds. Where there are so many files that a look takes
long, looks are rarer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

_log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
_REST = 9
"""Of the time that a look took, the least that passes before the next: all looks take a tenth of a core at most."""
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


def nameless_bytes(sessions: Collection[int]) -> dict[int, int]:
    """By session, the disk space of files that were removed, or never had a name, and are open in a process of it."""
    found: dict[int, dict[tuple[int, int], int]] = {session: {} for session in sessions}
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        with contextlib.suppress(OSError):  # it ended, or is another user's
            files = found.get(os.getsid(pid))
            for descriptor in () if files is None else os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if files is not None and status.st_nlink == 0 and stat.S_ISREG(status.st_mode):
                        files[status.st_dev, status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return {session: sum(files.values()) for session, files in found.items()}


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
            began_s = time.monotonic()
            nameless = nameless_bytes([watched.pid for watched in all_watched])
            for watched in all_watched:
                used = nameless[watched.pid] + used_bytes(str(watched.folder), watched.limit_bytes)
                if used > watched.limit_bytes:
                    self._end(watched, used)
            pause.wait(max(LOOK_EVERY_S, _REST * (time.monotonic() - began_s)))

    def _end(self, watched: Watched, used: int) -> None:
        with self._lock:
            if self._watched.get(watched.pid) is watched:
                del self._watched[watched.pid]
                watched.too_much(used)
