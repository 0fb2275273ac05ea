"""The byte format of what changed in a bucket, the same for all transports, and when a bucket is sent in it.

::

    n indexes, ascending, 4 bytes each (8 in buckets of more than 2**32 numbers) │ n new numbers

A number has the size of the smallest dtype of the bucket, and is compared and copied as an integer: every bit counts, also of zeros and
NaNs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.packing import DTYPE_BYTES

ByteArray = npt.NDArray[np.uint8]
UNSIGNED: Mapping[int, np.dtype[Any]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.uint32), 8: np.dtype(np.uint64)}
"""Types by which numbers are compared and copied, by bytes."""


def number_bytes(bucket: Bucket) -> int:
    """Size of the numbers by which a bucket is compared: the smallest of its dtypes; offsets and sizes are multiples of it."""
    return min(DTYPE_BYTES[slot.dtype] for slot in bucket.slots)


def index_type(bucket: Bucket) -> np.dtype[Any]:
    """What an index of a number in the bucket fits."""
    return UNSIGNED[4] if bucket.size_bytes // number_bytes(bucket) <= 2**32 else UNSIGNED[8]


def most_changes(bucket: Bucket, dense_above: float) -> int:
    """Numbers of a bucket that may have changed for it to travel as changes: at most that part of all, and fewer bytes than the whole."""
    size = number_bytes(bucket)
    return min(int(dense_above * (bucket.size_bytes // size)), (bucket.size_bytes - 1) // (index_type(bucket).itemsize + size))


def split_changes(bucket: Bucket, changes: ByteArray) -> tuple[npt.NDArray[np.unsignedinteger[Any]], npt.NDArray[np.unsignedinteger[Any]]]:
    """Ascending indexes of a bucket's numbers, and the new numbers, of what an encoder made."""
    number, index = UNSIGNED[number_bytes(bucket)], index_type(bucket)
    end = changes.size // (index.itemsize + number.itemsize) * index.itemsize
    return changes[:end].view(index), changes[end:].view(number)


def between(indexes: npt.NDArray[np.unsignedinteger[Any]], first: int, end: int) -> tuple[int, int]:
    """Where indexes from ``first`` to before ``end`` lie among ascending ones; sought in their type, or all would be converted."""
    kind = indexes.dtype.type
    return int(np.searchsorted(indexes, kind(first))), int(np.searchsorted(indexes, kind(end - 1), side="right"))
