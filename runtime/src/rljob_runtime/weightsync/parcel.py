"""One bucket on its way: its bytes or where they lie, and what they have to be when they arrive."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from rljob_runtime.errors import CorruptedWeightsError
from rljob_runtime.weightsync.shared_memory import SharedBytes

ByteArray = npt.NDArray[np.uint8]
Payload = ByteArray | SharedBytes
"""Bytes that travel in a message, or that every process of the node reads where they lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """What a sender makes of a bucket."""

    version: int
    """Of the weights."""
    checksum: int
    """xxh3, 64 bits, of the payload."""
    payload: Payload
    base: int | None = None
    """Version that it changes, see ``delta``; None: it is whole."""

    @property
    def size_bytes(self) -> int:
        """Of the payload."""
        return self.payload.size if isinstance(self.payload, np.ndarray) else self.payload.size_bytes

    def check(self, what: str) -> None:
        """Compare what can be read here with what was written.

        Raises:
            CorruptedWeightsError: it differs.
            WeightSyncError: shared memory cannot be read here.
        """
        found = checksum(view(self.payload))
        if found != self.checksum:
            raise CorruptedWeightsError(
                f"{what} of weights v{self.version} ({self.size_bytes} bytes) has checksum {found:016x}, it was sent with "
                f"{self.checksum:016x}: its bytes changed on the way"
            )


def sealed(version: int, data: ByteArray, payload: Payload | None = None, *, base: int | None = None) -> Parcel:
    """A parcel of ``data``; ``payload`` is where others find these bytes, when it is not the array itself."""
    return Parcel(version=version, checksum=checksum(data), payload=data if payload is None else payload, base=base)


def view(payload: Payload) -> ByteArray:
    """The bytes, to be read.

    Raises:
        WeightSyncError: shared memory cannot be read here.
    """
    return payload if isinstance(payload, np.ndarray) else payload.view()


def checksum(data: ByteArray) -> int:
    """Of contiguous bytes; faster than they can be copied."""
    return xxhash.xxh3_64_intdigest(data.data)
