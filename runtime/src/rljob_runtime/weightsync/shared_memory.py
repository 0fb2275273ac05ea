"""Shared memory of a node, by name: one process writes it, others read it where it lies.

Segments are POSIX shared memory, made and mapped through the file system that shows it: Python's own class starts a process that watches
over them, which outlives a killed trainer. Names begin with what the run calls itself, so that the segments of a crashed attempt are found
and removed by the driver of its machine or by the next attempt.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import WeightSyncError

ByteArray = npt.NDArray[np.uint8]

FOLDER = Path("/dev/shm")
"""Where the system shows POSIX shared memory as files."""

_mapped: dict[str, mmap.mmap] = {}
"""Segments that this process reads."""
_mapping = threading.Lock()
_serials = itertools.count()
"""No name is used twice: a reader may still have the old segment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBytes:
    """The first bytes of a segment, as another process of the node sees them."""

    segment: str
    size_bytes: int

    def view(self) -> ByteArray:
        """Read-only, on the segment itself: the bytes change when the writer fills it again.

        Raises:
            WeightSyncError: there is no such segment on this node, or it is smaller.
        """
        with _mapping:
            mapped = _mapped.get(self.segment) or _map(self.segment)
        if len(mapped) < self.size_bytes:
            raise WeightSyncError(f"shared memory {self.segment} has {len(mapped)} bytes, {self.size_bytes} were to be read")
        return np.frombuffer(mapped, dtype=np.uint8)[: self.size_bytes]


class Segments:
    """Segments of one writer."""

    def __init__(self, prefix: str, sizes: Mapping[str, int], *, remedy: str = "raise nodeGroups[].resources.sharedMemory") -> None:
        """Make them.

        Args:
            prefix: of their names; others on this node with it are left from before, and removed.
            sizes: bytes of each, by its name, which begins with ``prefix`` and was not used before.
            remedy: where there is not enough memory.

        Raises:
            WeightSyncError: the node has no shared memory, or not enough.
        """
        self._made: list[tuple[str, mmap.mmap]] = []
        remove(prefix)
        try:
            for name, size_bytes in sizes.items():
                self._made.append((name, _make(name, size_bytes)))
        except OSError as error:
            self.close()
            raise WeightSyncError(
                f"{sum(sizes.values())} bytes of shared memory ({len(sizes)} segments) cannot be had from {FOLDER}, which has "
                f"{_free_bytes()} free: {error}; {remedy}"
            ) from error

    @classmethod
    def equal(cls, prefix: str, count: int, size_bytes: int) -> Segments:
        """Make so many of one size, under names of this process that were not used before; errors are those of the class."""
        sizes = {f"{prefix}{os.getpid()}-{next(_serials)}": size_bytes for _ in range(count)}
        return cls(prefix, sizes, remedy="raise nodeGroups[].resources.sharedMemory, or lower weightSync.bucketBytes")

    def __len__(self) -> int:
        """How many there are."""
        return len(self._made)

    def array(self, index: int, size_bytes: int) -> ByteArray:
        """The first bytes of a segment, to be written."""
        return np.frombuffer(self._made[index][1], dtype=np.uint8)[:size_bytes]

    def whole(self, index: int) -> tuple[str, ByteArray]:
        """The name of a segment, and all of it."""
        name, mapped = self._made[index]
        return name, np.frombuffer(mapped, dtype=np.uint8)

    def shared(self, index: int, size_bytes: int) -> SharedBytes:
        """The same for readers."""
        return SharedBytes(segment=self._made[index][0], size_bytes=size_bytes)

    def close(self) -> None:
        """Remove them; who still reads keeps the memory until it lets go."""
        for name, _ in self._made:
            (FOLDER / name).unlink(missing_ok=True)
        self._made.clear()


def prefix_of(run: str) -> str:
    """How names of a run's segments begin."""
    return f"rljob-{run}-"


def remove(prefix: str) -> None:
    """Remove every segment of this node whose name begins so."""
    for path in FOLDER.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def _make(name: str, size_bytes: int) -> mmap.mmap:
    """A segment whose memory is there: without that, the first write to a full file system ends the process (SIGBUS)."""
    path, size_bytes = FOLDER / name, max(size_bytes, 1)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    except OSError:
        path.unlink()
        raise
    finally:
        os.close(descriptor)


def forget(prefix: str) -> None:
    """Let go of all segments that this process reads and whose names begin so."""
    with _mapping:
        for name in [name for name in _mapped if name.startswith(prefix)]:
            del _mapped[name]


def is_removed(segment: str) -> bool:
    """Whether its writer has removed a segment: no other process gets its bytes any more."""
    return not (FOLDER / segment).exists()


def mapped_for_device(segment: str) -> mmap.mmap:
    """A mapping of the caller's own whose memory a device may read.

    It is writable, though nothing writes to it: CUDA page-locks memory that the CPU maps as read-only on some devices only
    (``cudaDevAttrHostRegisterReadOnlySupported``).

    Raises:
        WeightSyncError: there is no such segment on this node.
    """
    return _opened(segment, os.O_RDWR, mmap.PROT_READ | mmap.PROT_WRITE)


def _map(segment: str) -> mmap.mmap:
    """Map a segment, and let go of those that their writers have removed."""
    for name in [name for name in _mapped if is_removed(name)]:
        del _mapped[name]
    mapped = _mapped[segment] = _opened(segment, os.O_RDONLY, mmap.PROT_READ)
    return mapped


def _opened(segment: str, flags: int, protection: int) -> mmap.mmap:
    try:
        descriptor = os.open(FOLDER / segment, flags)
    except OSError as error:
        raise WeightSyncError(f"shared memory {segment} cannot be read by process {os.getpid()}: {error}") from error
    try:
        return mmap.mmap(descriptor, 0, prot=protection)
    finally:
        os.close(descriptor)


def _free_bytes() -> int:
    try:
        found = os.statvfs(FOLDER)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
