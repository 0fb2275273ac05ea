"""Torch's file system writer, with files of a limited size.

Torch 2.13 keeps the host copies of all tensors of a file until the file is closed (https://github.com/pytorch/pytorch/issues/195982): with
as many files as threads that is all that a rank writes.
"""

from __future__ import annotations

import math
import queue
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

FILE_BYTES = 512 << 20
"""Host copies of the tensors of each file that is being written are kept; a larger tensor has a file of its own."""


class PiecewiseWriter(FileSystemWriter):
    """Writes about ``FILE_BYTES`` into each file, ``thread_count`` files at a time."""

    def __init__(self, folder: Path, *, threads: int, file_bytes: int = FILE_BYTES) -> None:
        """Files are synced. ``folder``: exists."""
        super().__init__(folder, sync_files=True, thread_count=threads)
        self._file_bytes = file_bytes

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what the plan says; torch calls it on every rank.

        Raises:
            OSError: some of it was not written, which torch does not report of its threads beyond the first.
        """
        files: queue.Queue[tuple[object, str, list[WriteItem]]] = queue.Queue()
        for number, items in enumerate(pieces(plan.items, self.thread_count, self._file_bytes)):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            files.put((self.fs.concat_path(self.path, name), name, items))
        written = self._write_data(planner, files)
        if (num_written := len(written.value())) != len(plan.items):
            raise OSError(f"{len(plan.items) - num_written} of {len(plan.items)} tensors were not written to {self.path}")
        return written


def pieces(items: Sequence[WriteItem], min_files: int, file_bytes: int) -> list[list[WriteItem]]:
    """Divide what a rank writes into files of about equal size: ``min_files``, or more if they would be larger than ``file_bytes``."""
    sizes = [size_bytes(item) for item in items]
    num_files = max(min_files, math.ceil(sum(sizes) / file_bytes))
    files: list[list[WriteItem]] = [[] for _ in range(num_files)]
    fills = [0] * num_files
    for size, item in sorted(zip(sizes, items, strict=True), key=lambda sized: -sized[0]):
        smallest = min(range(num_files), key=fills.__getitem__)
        files[smallest].append(item)
        fills[smallest] += size
    return [file for file in files if file] or files[:1]


def size_bytes(item: WriteItem) -> int:
    """Of the part of a tensor that this rank writes; what is no tensor is small."""
    return 0 if item.tensor_data is None else math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
