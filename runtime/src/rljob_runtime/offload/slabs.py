"""Host memory for offloaded state: taken once, kept for the life of the process, within a declared budget.

Page-locking costs far more per byte than the copy itself, so nothing is locked per switch. Chunks have power-of-two sizes, because
PyTorch's caching host allocator rounds pinned requests up to one; a region is exact to :data:`SMALLEST_CHUNK_BYTES`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping

import torch

from rljob_runtime.errors import HostBudgetError, OffloadError

DEFAULT_CHUNK_BYTES = 32 * 2**20
"""Between 16 and 64 MiB a copy runs at the bus's limit and still ends soon enough for its source to be freed early."""

SMALLEST_CHUNK_BYTES = 64 * 2**10
"""Granularity of a region's end."""


class Region:
    """Host memory of one owner: chunks in a row, addressed like one array of bytes. Grows, never shrinks."""

    def __init__(self) -> None:
        """Start empty; :meth:`HostSlabs.region` adds chunks."""
        self._chunks: list[torch.Tensor] = []
        self._starts: list[int] = []
        self.size_bytes = 0

    def add(self, chunk: torch.Tensor) -> None:
        """Append a one-dimensional uint8 tensor."""
        self._starts.append(self.size_bytes)
        self._chunks.append(chunk)
        self.size_bytes += chunk.numel()

    def pieces(self, offset: int, size_bytes: int) -> Iterator[torch.Tensor]:
        """Views, in order, that together are the bytes ``[offset, offset + size_bytes)``; one for each chunk touched.

        Raises:
            IndexError: the range ends behind the region.
        """
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise IndexError(f"bytes [{offset}, {offset + size_bytes}) of a region of {self.size_bytes}")
        index = bisect.bisect_right(self._starts, offset) - 1
        while size_bytes > 0:
            chunk, begin = self._chunks[index], offset - self._starts[index]
            length = min(size_bytes, chunk.numel() - begin)
            yield chunk[begin : begin + length]
            offset, size_bytes, index = offset + length, size_bytes - length, index + 1


class HostSlabs:
    """All host memory that one process keeps for offloaded state."""

    def __init__(self, *, pinned: bool, budget_bytes: int | None = None, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        """Take nothing yet.

        Args:
            pinned: page-locked, for copies from and to a CUDA device; plain memory otherwise.
            budget_bytes: most this process may keep; None sets no limit.
            chunk_bytes: size of a full chunk, a power of two of at least :data:`SMALLEST_CHUNK_BYTES`.

        Raises:
            ValueError: the chunk size or the budget has no meaning.
        """
        if chunk_bytes < SMALLEST_CHUNK_BYTES or chunk_bytes & (chunk_bytes - 1):
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be a power of two of at least {SMALLEST_CHUNK_BYTES}")
        if budget_bytes is not None and budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}; it must be at least 0, or None for no limit")
        self.pinned = pinned
        self.budget_bytes = budget_bytes
        self.chunk_bytes = chunk_bytes
        self.held_bytes = 0
        """Host memory taken so far."""
        self.allocations = 0
        """Chunks taken so far; constant after warm-up."""
        self._regions: dict[str, Region] = {}

    def region(self, owner: str, size_bytes: int) -> Region:
        """The owner's region, grown to at least ``size_bytes`` where it is smaller.

        Raises:
            HostBudgetError: the budget does not allow it; nothing was taken.
            OffloadError: the machine has no memory left.
        """
        self.require({owner: size_bytes})
        region = self._regions.setdefault(owner, Region())
        for size in self._missing(owner, size_bytes):
            region.add(self._allocate(owner, size))
        return region

    def require(self, size_bytes: Mapping[str, int]) -> None:
        """Check that there can be regions of these sizes, by owner, all at once.

        Raises:
            HostBudgetError: the budget does not allow it; names what is missing in total.
        """
        missing_bytes = sum(sum(self._missing(owner, size)) for owner, size in size_bytes.items())
        wanted_bytes = self.held_bytes + missing_bytes
        if missing_bytes and self.budget_bytes is not None and wanted_bytes > self.budget_bytes:
            what = ", ".join(f"{owner} ({size} bytes)" for owner, size in size_bytes.items())
            raise HostBudgetError(
                f"offloading {what} needs {missing_bytes} bytes of host memory on top of {self.held_bytes} held: "
                f"{wanted_bytes} in all, but this worker's share of the budget is {self.budget_bytes}; "
                "raise spec.offload.hostMemoryBytes, or keep a kind of state on the device (components[].offload: Never)",
                rolled_back=True,
            )

    def _missing(self, owner: str, size_bytes: int) -> list[int]:
        """Sizes of the chunks that the owner's region lacks."""
        region = self._regions.get(owner)
        return chunk_sizes(max(0, size_bytes - (0 if region is None else region.size_bytes)), self.chunk_bytes)

    def close(self) -> None:
        """Give all host memory back; regions handed out keep theirs until they are dropped."""
        self._regions.clear()
        self.held_bytes = 0

    def _allocate(self, owner: str, size_bytes: int) -> torch.Tensor:
        try:
            chunk = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self.pinned)
        except (RuntimeError, MemoryError) as error:
            kind = "page-locked host memory" if self.pinned else "host memory"
            raise OffloadError(
                f"offloading {owner}: {size_bytes} bytes of {kind} are not to be had with {self.held_bytes} held ({error}); "
                "give the pod more memory (and memlock), or set a smaller spec.offload.hostMemoryBytes and offload less",
                rolled_back=True,
            ) from error
        self.held_bytes += size_bytes
        self.allocations += 1
        return chunk


def chunk_sizes(size_bytes: int, chunk_bytes: int) -> list[int]:
    """Power-of-two sizes, largest first, whose sum is ``size_bytes`` rounded up to :data:`SMALLEST_CHUNK_BYTES`."""
    full, rest = divmod(size_bytes, chunk_bytes)
    units = -(-rest // SMALLEST_CHUNK_BYTES)
    bits = [1 << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
    return [chunk_bytes] * full + [bit * SMALLEST_CHUNK_BYTES for bit in bits]
