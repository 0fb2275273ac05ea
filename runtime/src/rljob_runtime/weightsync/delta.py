"""Sparse syncs: of a bucket only the numbers that differ, bit by bit, from what was sent last.

::

    rank 0   packed bucket ──DeltaEncoder──> indexes and new values, or the bucket ──> engine ──Images──> packed bucket

Rank 0 keeps what it sent, engines keep what they got: a copy of the weights in host memory each. Numbers are compared as they travel, in
the engine's dtype, where a step of a small learning rate leaves most of bfloat16's bits as they are. A sparse bucket names the version
that it changes. An engine that has another one, or none, refuses it; the publisher makes both ends again when an engine comes in or a
sync failed, so that everything is sent whole then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.packing import DTYPE_BYTES
from rljob_runtime.weightsync.parcel import Parcel, view

ByteArray = npt.NDArray[np.uint8]
UNSIGNED: Mapping[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
"""Types by which numbers are compared and copied, by bytes."""


class DeltaEncoder:
    """Of rank 0; keeps every bucket that it encoded."""

    def __init__(self, dense_above: float) -> None:
        """``dense_above``: part of a bucket's numbers from which on it travels whole."""
        self._dense_above = dense_above
        self._sent: dict[int, tuple[int, ByteArray]] = {}

    def encode(self, version: int, bucket: Bucket, data: ByteArray) -> tuple[ByteArray, int | None]:
        """What has to travel, and the version that it changes; None: all of it.

        Args:
            version: of the data.
            bucket: its layout.
            data: shape (bucket.size_bytes,), kept; must not be written any more.

        Returns:
            uint8: the data, or for n changed numbers n indexes followed by n numbers.
        """
        before = self._sent.get(bucket.index)
        self._sent[bucket.index] = version, data
        if before is None:
            return data, None
        number = UNSIGNED[number_bytes(bucket)]
        index = index_type(bucket)
        base, old = before[0], before[1].view(number)
        new = data.view(number)
        differs = new != old
        count = int(np.count_nonzero(differs))
        size = count * (index.itemsize + number.itemsize)
        if count > self._dense_above * new.size or size >= data.size:
            return data, None
        changed = np.flatnonzero(differs)
        sparse = np.empty(size, dtype=np.uint8)
        sparse[: count * index.itemsize].view(index)[:] = changed
        sparse[count * index.itemsize :].view(number)[:] = new[changed]
        return sparse, base


class Images:
    """Of an engine: every bucket as it came last."""

    def __init__(self) -> None:
        """Nothing has come."""
        self._held: dict[int, tuple[int, ByteArray]] = {}

    def apply(self, bucket: Bucket, parcel: Parcel) -> ByteArray:
        """The whole bucket after a parcel; read-only, and changed by the next one.

        Raises:
            WeightSyncError: it changes a version that is not here.
        """
        held = self._held.get(bucket.index)
        data = view(parcel.payload)
        if parcel.base is None:
            image = held[1] if held is not None and held[1].size == data.size else np.empty(data.size, dtype=np.uint8)
            image[:] = data
        elif held is None or held[0] != parcel.base:
            found = "none" if held is None else f"v{held[0]}"
            raise WeightSyncError(
                f"bucket {bucket.index} has the changes from weights v{parcel.base} to v{parcel.version}, "
                f"and this engine has {found} of it; send it whole"
            )
        else:
            image = held[1]
            number, index = UNSIGNED[number_bytes(bucket)], index_type(bucket)
            count = data.size // (index.itemsize + number.itemsize)
            changed = data[: count * index.itemsize].view(index)
            image.view(number)[changed] = data[count * index.itemsize :].view(number)
        self._held[bucket.index] = parcel.version, image
        shown = image.view()
        shown.flags.writeable = False
        return shown


def number_bytes(bucket: Bucket) -> int:
    """Size of the numbers by which a bucket is compared: the smallest of its dtypes; offsets and sizes are multiples of it."""
    return min(DTYPE_BYTES[slot.dtype] for slot in bucket.slots)


def index_type(bucket: Bucket) -> np.dtype[Any]:
    """What an index of a number in the bucket fits."""
    return UNSIGNED[4] if bucket.size_bytes // number_bytes(bucket) <= 2**32 else UNSIGNED[8]
