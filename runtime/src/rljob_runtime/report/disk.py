"""Writing to disk so that a failure names the path, how many bytes, how many are free, and what to do.

All files of a run are written through here or inside ``writing``; nothing else in the package maps ``OSError``.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.report.text import format_bytes

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)


def free_bytes(path: Path) -> int:
    """Bytes a process may still write on the file system of ``path`` or of its nearest existing parent.

    Raises:
        OSError: the file system does not answer.
    """
    here = path.absolute()
    while not here.exists() and here != here.parent:
        here = here.parent
    return shutil.disk_usage(here).free


def require_space(path: Path, needed_bytes: int, what: str, *, error: type[RuntimeFault] = RuntimeFault) -> None:
    """Check that ``needed_bytes`` fit before writing them.

    Raises:
        RuntimeFault: ``error`` is raised when they do not fit, with the path, both figures and the remedy.
    """
    free = free_bytes(path)
    if free < needed_bytes:
        raise error(
            f"{path}: no space for {what}: {format_bytes(needed_bytes)} needed, {format_bytes(free)} free; "
            "free some space or choose an output folder on another disk"
        )


@contextmanager
def writing(path: Path, what: str, *, needed_bytes: int | None = None, error: type[RuntimeFault] = RuntimeFault) -> Iterator[None]:
    """Turn an ``OSError`` of the body into ``error`` with path, cause and remedy.

    ``needed_bytes`` is the size of what is being written, where it is known.

    Raises:
        RuntimeFault: ``error``, chained to the ``OSError``.
    """
    try:
        yield
    except OSError as exc:
        if exc.errno in _NO_SPACE:
            needed = f"{format_bytes(needed_bytes)} needed, " if needed_bytes is not None else ""
            free = format_bytes(free_bytes(path))
            detail = f"no space left: {needed}{free} free; free some space or choose an output folder on another disk"
        elif exc.errno in _NO_RIGHT:
            detail = f"not writable ({exc.strerror}); choose a folder this user may write to"
        else:
            detail = f"{exc.strerror or exc}; check the disk and the path"
        raise error(f"{path}: cannot write {what}: {detail}") from exc


def replace_text(path: Path, text: str, what: str) -> None:
    """Write a whole file so that a reader sees the old or the new content, never half of it.

    Raises:
        RuntimeFault: the file cannot be written.
    """
    data = text.encode("utf-8", "replace")  # models and their tools also write what is no text
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path, what, needed_bytes=len(data)):
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
