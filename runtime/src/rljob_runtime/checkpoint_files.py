"""What the files of a checkpoint have to be: size and CRC-32 of each, taken when it was written and compared before it is read.

The ranks that write a checkpoint sum their files up, the driver keeps the sums in the checkpoint's mark, and before a resume the ranks
share the files out among them. CRC-32 finds damage, not malice: what is read is checked besides (:mod:`rljob_runtime.training.checkpoint`).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES = 8 * 2**20
"""Read at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """One file as it was written."""

    name: str
    """Path in the checkpoint's folder, with ``/`` between parts."""
    size_bytes: int
    crc32: int


def sum_file(folder: Path, name: str) -> FileSum:
    """Size and checksum of ``folder / name`` as it is now.

    Raises:
        OSError: it cannot be read.
    """
    checksum, size_bytes = 0, 0
    with (folder / name).open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
            size_bytes += len(piece)
    return FileSum(name=name, size_bytes=size_bytes, crc32=checksum)


def missing_or_cut(folder: Path, files: Sequence[FileSum]) -> list[str]:
    """What is wrong with the sizes of ``files`` below ``folder``; reads nothing."""
    problems = []
    for file in files:
        try:
            size_bytes = (folder / file.name).stat().st_size
        except OSError as error:
            problems.append(f"{file.name} cannot be read ({error.strerror})")
            continue
        if size_bytes != file.size_bytes:
            problems.append(f"{file.name} has {size_bytes} bytes, {file.size_bytes} were written")
    return problems


def damaged(folder: Path, files: Sequence[FileSum]) -> list[str]:
    """What is wrong with ``files`` below ``folder``, each of them read."""
    problems = missing_or_cut(folder, files)
    if problems:
        return problems
    for file in files:
        try:
            found = sum_file(folder, file.name)
        except OSError as error:
            problems.append(f"{file.name} cannot be read ({error.strerror})")
            continue
        if found != file:
            problems.append(f"{file.name} has the checksum {found.crc32:08x}, {file.crc32:08x} was written")
    return problems
