"""Sparse syncs of a sender with a CUDA device whose buckets travel through host memory: what ``delta`` does, at the speed of the bus.

::

    bucket as last sent, in host memory ──> device ─┐
    bucket, packed on the device ───────────────────┼──> changes ──> host memory, from where they travel
                                 └──────────────────┴──> host memory, in place of what was sent last

One core compares half a gigabyte in a second, a device all that the bus brings. The device needs room for the bucket before and for its
changes, and for no copy of the weights, which ``device_delta`` keeps there.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import numpy as np
import torch

from rljob_runtime.offload.copies import Copies, Direction, copies_for
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.changes import most_changes
from rljob_runtime.weightsync.delta import BaseDeltaEncoder, ByteArray, DeltaEncoder
from rljob_runtime.weightsync.device_delta import changed_on_device
from rljob_runtime.weightsync.group import device_here
from rljob_runtime.weightsync.packing import as_byte_tensor
from rljob_runtime.weightsync.staging import CHUNK_BYTES, CudaHostMemory, HostMemory

logger = logging.getLogger(__name__)


class StagedDeltaEncoder(BaseDeltaEncoder[torch.Tensor, ByteArray]):
    """Packed on a device, sent and kept in host memory."""

    def __init__(self, dense_above: float, device: torch.device, copies: Copies, memory: HostMemory) -> None:
        """Keep nothing yet.

        Args:
            dense_above: as of the base class.
            device: where buckets are packed.
            copies: of that device.
            memory: what page-locks the copies of buckets.
        """
        super().__init__(dense_above)
        self._device = device
        self._copies = copies
        self._memory = memory
        self._locked: list[int] = []
        """Addresses."""
        self._pageable = False

    def room(self, bucket: Bucket) -> torch.Tensor:
        """See the base class."""
        return torch.zeros(bucket.size_bytes, dtype=torch.uint8, device=self._device)

    def close(self) -> None:
        """See the base class."""
        while self._locked:  # before the memory is gone
            refused = self._memory.unlock(self._locked.pop())
            if refused is not None:
                logger.warning("the copy of a bucket stays page-locked until this process ends: %s", refused)
        super().close()

    def _kept(self, packed: torch.Tensor) -> ByteArray:
        # Whole pages of its own, which are locked and unlocked without those of another copy.
        memory = mmap.mmap(-1, max(1, packed.numel()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        image = np.frombuffer(memory, dtype=np.uint8)[: packed.numel()]
        if image.size and not self._pageable:
            refused = self._memory.lock(image.ctypes.data, image.size)
            if refused is None:
                self._locked.append(image.ctypes.data)
            else:
                self._pageable = True
                logger.warning("what was sent last cannot be page-locked, and is compared more slowly: %s", refused)
        self._replace(image, packed)
        return image

    def _replace(self, image: ByteArray, packed: torch.Tensor) -> None:
        self._copy(Direction.OFFLOAD, as_byte_tensor(image), packed)

    def _patched(self, bucket: Bucket, image: ByteArray, packed: torch.Tensor, place: Callable[[int], ByteArray]) -> ByteArray | None:
        before = torch.empty_like(packed)
        self._copy(Direction.LOAD, before, as_byte_tensor(image))

        def on_device(size_bytes: int) -> torch.Tensor:
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

        changes = changed_on_device(bucket, before, packed, most_changes(bucket, self._dense_above), on_device)
        if changes is None:
            return None
        target = place(changes.numel())
        self._copy(Direction.OFFLOAD, as_byte_tensor(target), changes)
        self._replace(image, packed)
        return target

    def _fresh(self, size_bytes: int) -> ByteArray:
        return np.empty(size_bytes, dtype=np.uint8)

    def _copy(self, direction: Direction, target: torch.Tensor, source: torch.Tensor) -> None:
        self._copies.begin(direction)
        try:
            for first in range(0, source.numel(), CHUNK_BYTES):
                self._copies.copy(target[first : first + CHUNK_BYTES], source[first : first + CHUNK_BYTES])
        finally:
            self._copies.drain()


def encoder_here(dense_above: float) -> DeltaEncoder | StagedDeltaEncoder:
    """Of changes that travel through host memory: which of the two depends on where this process packs."""
    device = device_here()
    if device.type != "cuda":
        return DeltaEncoder(dense_above)
    return StagedDeltaEncoder(dense_above, device, copies_for(device), CudaHostMemory())
