"""Copies between a CUDA device and the shared segments of a node, which are page-locked for them: at the full speed of the bus.

::

    trainer rank   device buffer ──copy stream, in chunks──> segment       each chunk is hashed while later ones are copied
    engine process segment ──copy stream, in chunks──> device buffer       the segment is hashed while it is copied

A process page-locks its own mapping of a segment, once, and unlocks it before it lets go of it. Nothing returns while a copy may still
read or write a segment, so that the next user of the segment may fill it again. Where CUDA refuses to lock memory, the same copies
go through CUDA's own pageable staging, and a warning says why.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rljob_runtime.cuda_errors import clear_last_error
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.offload.copies import Copies, Direction, copies_for
from rljob_runtime.weightsync.packing import as_byte_tensor
from rljob_runtime.weightsync.parcel import Digest, UnprovenBytes
from rljob_runtime.weightsync.shared_memory import SharedBytes, is_removed, mapped_for_device

logger = logging.getLogger(__name__)

ByteArray = npt.NDArray[np.uint8]
CHUNK_BYTES = 32 << 20
"""As the offload's: between 16 and 64 MiB a copy runs at the bus's limit."""
HASH_THREADS = 4
"""One core hashes at about half the speed of a PCIe 5 bus."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: memory is page-locked for all CUDA contexts of the process, as torch's own code does it."""


class HostMemory(Protocol):
    """Page-locks memory of this process; the border to the CUDA runtime."""

    def lock(self, address: int, size_bytes: int) -> str | None:
        """Page-lock memory that is mapped; why it could not be, None where it is locked."""
        ...

    def unlock(self, address: int) -> str | None:
        """Undo :meth:`lock` of that address; why it could not be, None where it is unlocked."""
        ...


class CudaHostMemory:
    """By ``cudaHostRegister``, as torch binds it: both calls release the interpreter's lock and return a ``cudaError``."""

    def lock(self, address: int, size_bytes: int) -> str | None:
        """See :class:`HostMemory`."""
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, PORTABLE))
        except (RuntimeError, AssertionError) as error:  # torch without CUDA, no driver, a forked process
            return f"cudaHostRegister cannot be called: {error}"
        return self._described("cudaHostRegister", code)

    def unlock(self, address: int) -> str | None:
        """See :class:`HostMemory`."""
        return self._described("cudaHostUnregister", int(torch.cuda.cudart().cudaHostUnregister(address)))

    def _described(self, call: str, code: int) -> str | None:
        if code == torch.cuda.cudaStatus.SUCCESS:
            return None
        clear_last_error()
        return f"{call}: {torch.cuda.CudaError(code)}"


@dataclass(slots=True, kw_only=True)
class _Mapping:
    """A segment in this process."""

    data: ByteArray
    """Keeps the memory mapped."""
    locked: bool


class Staging:
    """One process's copies between its device and segments. Not thread-safe."""

    def __init__(self, device: torch.device, copies: Copies, memory: HostMemory) -> None:
        """Lock nothing yet.

        Args:
            device: whose memory is copied to and from.
            copies: of that device.
            memory: what page-locks segments.
        """
        self.pageable: str | None = None
        """Why segments are copied without being page-locked; None while all are."""
        self._device = device
        self._copies = copies
        self._memory = memory
        self._has_warned = False
        self._mappings: dict[str, _Mapping] = {}
        self._threads = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="rljob-hash")

    def add(self, segment: str, data: ByteArray) -> None:
        """Page-lock a segment that this process has mapped.

        Args:
            segment: its name.
            data: all of it, shape (B,).
        """
        refused = self.pageable
        if refused is None:
            refused = self._memory.lock(data.ctypes.data, data.size)
            if refused is not None:
                self.pageable = f"{data.size} bytes of shared memory ({segment}) cannot be page-locked: {refused}"
                logger.warning(
                    "%s; weights are copied at the speed of pageable memory. Raise the container's memory and memlock limits", self.pageable
                )
        self._mappings[segment] = _Mapping(data=data, locked=refused is None)

    def room(self, size_bytes: int) -> torch.Tensor | None:
        """Zeros on the device, shape (size_bytes,) uint8, ordered on its current stream; None where it has no memory for them."""
        try:
            return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            if not self._has_warned:
                logger.warning(
                    "weights are copied tensor by tensor: %s has no room for %d bytes of a bucket: %s", self._device, size_bytes, error
                )
            self._has_warned = True
            return None

    def off(self, source: torch.Tensor, target: ByteArray) -> int:
        """Copy from the device into a segment, after all that the current stream was given.

        Args:
            source: shape (B,) uint8, on the device.
            target: shape (B,), in a segment of :meth:`add`.

        Returns:
            The checksum of what is in the segment now.
        """
        host, ends = as_byte_tensor(target), _ends(target.size)
        digest = Digest(target, self._threads)
        self._copies.begin(Direction.OFFLOAD)
        try:
            marks = []
            for first, end in ends:
                self._copies.copy(host[first:end], source[first:end])
                marks.append(self._copies.mark())
            for mark, (_, end) in zip(marks, ends, strict=True):
                self._copies.wait(mark)
                digest.advance(end)
        finally:
            self._copies.drain()
        return digest.finished()

    def onto(self, shared: SharedBytes) -> torch.Tensor:
        """Copy what another process has put into a segment onto the device; the checksum of unproven bytes is compared meanwhile.

        Returns:
            Shape (shared.size_bytes,) uint8, for the current stream; the segment may be filled again.

        Raises:
            CorruptedWeightsError: they are not what was sent.
            WeightSyncError: there is no such segment on this node, or it is smaller.
        """
        data = self._mapped(shared)
        host = as_byte_tensor(data)
        target = torch.empty(data.size, dtype=torch.uint8, device=self._device)
        self._copies.begin(Direction.LOAD)
        try:
            for first, end in _ends(data.size):
                self._copies.copy(target[first:end], host[first:end])
            if isinstance(shared, UnprovenBytes):
                shared.prove(Digest(data, self._threads))
        finally:
            self._copies.drain()
        return target

    def forget(self, prefix: str) -> None:
        """Unlock the segments whose names begin so, and let go of them."""
        for segment in [segment for segment in self._mappings if segment.startswith(prefix)]:
            self._drop(segment)

    def close(self) -> None:
        """Unlock all segments and let go of them."""
        for segment in list(self._mappings):
            self._drop(segment)
        self._threads.shutdown()

    def _mapped(self, shared: SharedBytes) -> ByteArray:
        """The bytes; a segment is mapped and locked when it is first seen, and those that their writers have removed are dropped."""
        if shared.segment not in self._mappings:
            for segment in [segment for segment in self._mappings if is_removed(segment)]:
                self._drop(segment)
            self.add(shared.segment, np.frombuffer(mapped_for_device(shared.segment), dtype=np.uint8))
        data = self._mappings[shared.segment].data
        if data.size < shared.size_bytes:
            raise WeightSyncError(f"shared memory {shared.segment} has {data.size} bytes, {shared.size_bytes} were to be read")
        return data[: shared.size_bytes]

    def _drop(self, segment: str) -> None:
        """No copy is under way: :meth:`off` and :meth:`onto` have waited for theirs."""
        mapping = self._mappings.pop(segment)
        if not mapping.locked:
            return
        refused = self._memory.unlock(mapping.data.ctypes.data)
        if refused is not None:
            logger.warning("shared memory %s stays page-locked until this process ends: %s", segment, refused)


def staging_for(device: torch.device) -> Staging | None:
    """That of a CUDA device; None for others, whose memory is the host's."""
    return Staging(device, copies_for(device), CudaHostMemory()) if device.type == "cuda" else None


def _ends(size_bytes: int) -> list[tuple[int, int]]:
    """First byte and end of each chunk."""
    return [(first, min(first + CHUNK_BYTES, size_bytes)) for first in range(0, size_bytes, CHUNK_BYTES)]
