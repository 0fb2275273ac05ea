"""One bucket on its way: its bytes or where they lie, and what they have to be when they arrive."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from rljob_runtime.errors import CorruptedWeightsError, WholeNeededError
from rljob_runtime.weightsync.packing import as_byte_array
from rljob_runtime.weightsync.shared_memory import SharedBytes

if TYPE_CHECKING:
    import torch

ByteArray = npt.NDArray[np.uint8]
CHANGED = "its bytes changed on the way"
"""How a corrupted bucket is known where an error comes as text alone, from another process of an engine."""
SEND_WHOLE = "send it whole"
"""The same of changes of weights that the engine does not have."""
NOT_OPENED = "cannot be opened on"
"""The same of memory of another process that cannot be reached from here: what CUDA says of that is no end of the reader's device."""
BLOCK_BYTES = 2 << 20
"""Of a checksum: a block is packed and hashed with one trip to the memory. Copies of less than 1 MiB take twice as long on an AMD EPYC."""
CHUNK_WORDS = 1 << 22
"""Of 8 bytes, summed at a time on a device: what a checksum takes beside the data."""


class Remote(ABC):
    """Bytes that every process of an engine gets by itself, where its part of the model is, and proves there."""

    __slots__ = ()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """How many."""

    @property
    @abstractmethod
    def lent(self) -> bool:
        """Whether they lie in the sender's memory, which it fills again."""

    @abstractmethod
    def fetch(self, process: int, device: torch.device) -> torch.Tensor:
        """Flat uint8 on the device; once in each process.

        Args:
            process: of the engine, by its rank there.
            device: of that process.

        Raises:
            CorruptedWeightsError: they are not what was sent.
            WeightSyncError: they did not come, or cannot be opened here.
            DeadlineError: they did not come in time.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class UnprovenBytes(SharedBytes):
    """Bytes that have not been compared with what was sent: each process that loads them does that while it copies them."""

    checksum: int
    """Of :func:`checksum`."""
    what: str
    """For messages."""

    def view(self) -> ByteArray:
        """Read-only, and proven; see ``SharedBytes.view``.

        Raises:
            CorruptedWeightsError: they are not what was sent.
            WeightSyncError: they cannot be read here.
        """
        data = self.unproven()
        self.prove(Digest(data))
        return data

    def unproven(self) -> ByteArray:
        """Read-only; :meth:`prove` says whether they are what was sent."""
        return SharedBytes.view(self)

    def prove(self, digest: Digest) -> None:
        """Compare with what was sent.

        Raises:
            CorruptedWeightsError: it differs.
        """
        compare(digest.finished(), self.checksum, self.what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A bucket in an engine that keeps what came before; see ``delta.Images``."""

    whole: ByteArray | SharedBytes | Remote | None
    """All of it; None: the engine's parameters alone have it."""
    changes: ByteArray | SharedBytes | Remote | None = None
    """What came, see ``changes``; None: the whole bucket."""
    base: int | None = None
    """Version that ``changes`` change."""


Payload = ByteArray | SharedBytes | Remote | Held
"""Bytes that travel in a message, that every process of the node reads where they lie, that each process fetches, or with what changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a sender makes of a bucket."""

    version: int
    """Of the weights."""
    checksum: int
    """Of the payload, see :func:`checksum`."""
    payload: ByteArray | SharedBytes | Remote
    base: int | None = None
    """Version that it changes, see ``delta``; None: it is whole."""

    @property
    def size_bytes(self) -> int:
        """Of the payload."""
        return size_of(self.payload)

    def check(self, what: str) -> None:
        """Compare what can be read here with what was written; what others fetch they prove themselves.

        Raises:
            CorruptedWeightsError: it differs.
            WeightSyncError: shared memory cannot be read here.
        """
        if not isinstance(self.payload, Remote):
            compare(checksum(view(self.payload)), self.checksum, self._described(what))

    def unproven(self, what: str) -> UnprovenBytes:
        """What lies in shared memory, to be compared by those that load it."""
        assert isinstance(self.payload, SharedBytes)
        where = self.payload
        return UnprovenBytes(segment=where.segment, size_bytes=where.size_bytes, checksum=self.checksum, what=self._described(what))

    def _described(self, what: str) -> str:
        return f"{what} of weights v{self.version} ({self.size_bytes} bytes)"


def sealed(version: int, data: ByteArray, payload: ByteArray | SharedBytes | Remote | None = None, *, base: int | None = None) -> Parcel:
    """A parcel of ``data``; ``payload`` is where others find these bytes, when it is not the array itself."""
    return Parcel(version=version, checksum=checksum(data), payload=data if payload is None else payload, base=base)


def size_of(payload: ByteArray | SharedBytes | Remote) -> int:
    """Bytes of a payload."""
    if isinstance(payload, Remote):
        return payload.num_bytes
    return payload.size if isinstance(payload, np.ndarray) else payload.size_bytes


def view(payload: Payload) -> ByteArray:
    """The bytes, to be read; of what an engine holds, the whole bucket.

    Raises:
        WholeNeededError: no copy of the whole bucket is kept.
        WeightSyncError: shared memory cannot be read here.
    """
    if isinstance(payload, Held):
        if payload.whole is None:
            raise WholeNeededError(f"a bucket of which the engine keeps no copy came as changes alone; {SEND_WHOLE}")
        return view(payload.whole)
    if isinstance(payload, Remote):
        import torch

        fetched: ByteArray = payload.fetch(0, torch.device("cpu")).numpy()
        return fetched
    return payload if isinstance(payload, np.ndarray) else payload.view()


def compare(found: int, sent: int, what: str) -> None:
    """Refuse bytes with another checksum.

    Raises:
        CorruptedWeightsError: they differ.
    """
    if found != sent:
        raise CorruptedWeightsError(f"{what} has checksum {found:016x}, it was sent with {sent:016x}: {CHANGED}")


def checksum(data: ByteArray) -> int:
    """Of contiguous bytes, 64 bits: xxh3 of the xxh3 of each of their blocks, faster than they can be copied."""
    return Digest(data).finished()


class Digest:
    """The checksum of bytes that come one after the other; blocks of them at the same time, where there are threads."""

    def __init__(self, data: ByteArray, threads: Executor | None = None) -> None:
        """Nothing of ``data`` has come; with ``threads`` blocks are hashed by these."""
        self._data = data
        self._threads = threads
        self._blocks: list[int] = []

    def advance(self, end: int) -> None:
        """All before ``end`` has come, and does not change any more."""
        first, last = len(self._blocks), end // BLOCK_BYTES
        if self._threads is None:
            self._blocks += [self._block(index) for index in range(first, last)]
        else:
            self._blocks += self._threads.map(self._block, range(first, last))

    def finished(self) -> int:
        """The checksum; the rest has come, too."""
        self.advance(self._data.size)
        blocks = [*self._blocks, self._block(len(self._blocks))]  # the last one may be shorter, or empty
        return xxhash.xxh3_64_intdigest(np.array(blocks, dtype="<u8").data)

    def _block(self, index: int) -> int:
        return xxhash.xxh3_64_intdigest(self._data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES].data)


def fingerprint(data: torch.Tensor) -> int:
    """Of a flat uint8 tensor: the checksum of its bytes, or on a device :func:`device_checksum`. Both ends are of one kind."""
    return checksum(as_byte_array(data)) if data.device.type == "cpu" else device_checksum(data)


def device_checksum(data: torch.Tensor) -> int:
    """64 bits that any changed bit and any two exchanged words change, computed where the data is.

    Words are mixed, multiplied by odd numbers that differ by place, and summed with overflow: an odd factor loses no bit.
    """
    import torch

    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for first in range(0, words.numel(), CHUNK_WORDS):
        part = words[first : first + CHUNK_WORDS]
        factors = torch.arange(first, first + part.numel(), dtype=torch.int64, device=data.device).mul_(2).add_(1)
        total += factors.mul_(part ^ (part >> 29)).sum()
    if whole < data.numel():
        rest = data[whole:].to(torch.int64)
        total += (rest * torch.arange(1, 2 * rest.numel(), 2, device=data.device) << 32).sum()
    return int(total.item()) & (2**64 - 1)
