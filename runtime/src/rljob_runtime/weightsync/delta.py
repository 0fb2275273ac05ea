"""Sparse syncs: of a bucket only the numbers that differ, bit by bit, from what was sent last.

::

    sender   packed bucket ──DeltaEncoder──> indexes and new values, or the bucket ──> engine ──Images──> the same, and the packed bucket

A sender keeps what it sent, engines keep what they got: a copy of the weights in host memory each. An engine that writes what changed into
its parameters (``patching``) drops its copy of buckets for which it needs none. Buckets that travel between devices are kept and compared
there (``device_delta``), and copies are kept by the processes that fetch them (``copies``). Numbers are compared as they travel, in
the engine's dtype, where a step of a small learning rate leaves most of bfloat16's bits as they are. A sparse bucket names the version
that it changes. An engine that has another one, or none, refuses it; the publisher makes both ends again when an engine comes in or a
sync failed, so that everything is sent whole then.

In host memory, what differs is looked for in words of 8 bytes and in pieces that fit a core's cache, and memory is used again: a fresh
array of a bucket's size costs more in page faults than reading it twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import WholeNeededError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.changes import UNSIGNED, index_type, most_changes, number_bytes, split_changes
from rljob_runtime.weightsync.copies import Kept
from rljob_runtime.weightsync.packing import clear_gaps
from rljob_runtime.weightsync.parcel import Held, Parcel, Remote, view

if TYPE_CHECKING:
    import torch

ByteArray = npt.NDArray[np.uint8]
PackedT = TypeVar("PackedT", ByteArray, "torch.Tensor")
SentT = TypeVar("SentT", ByteArray, "torch.Tensor")
Indexes = npt.NDArray[np.int64]
WORD_BYTES = 8
PIECE_WORDS = 1 << 14
"""Compared at a time: 128 KiB of each side."""
FEW = 8
"""One changed word in so many, or fewer: the numbers in these are looked at one by one."""


class BaseDeltaEncoder(ABC, Generic[PackedT, SentT]):
    """Of a sender; keeps every bucket that it encoded, in the kind of memory from which it is sent."""

    whole_first = 1
    """Versions of a bucket that travel whole before one may travel as changes."""

    def __init__(self, dense_above: float) -> None:
        """``dense_above``: part of a bucket's numbers from which on it travels whole."""
        self._dense_above = dense_above
        self._sent: dict[int, tuple[int, int, SentT]] = {}
        """By bucket: the version that was sent last, how many were, and the bytes."""

    @abstractmethod
    def room(self, bucket: Bucket) -> PackedT:
        """Where the bucket has to be packed before it is encoded, shape (bucket.size_bytes,) uint8; gaps between its slots are zeros."""

    def encode(
        self, version: int, bucket: Bucket, packed: PackedT, place: Callable[[int], SentT] | None = None
    ) -> tuple[SentT, int | None]:
        """What has to travel, and the version that it changes; None: all of it.

        Args:
            version: of the weights.
            bucket: its layout.
            packed: what :meth:`room` returned.
            place: makes memory of so many bytes for what travels; None: fresh memory for changes, none for a whole bucket.

        Returns:
            uint8, flat: the changes, see ``changes``, or the whole bucket; in ``place``, or a bucket that stays as it is until it is
            encoded again.
        """
        before, changes = self._sent.get(bucket.index), None
        if before is None:
            base, count, image = None, 0, self._kept(packed)
        else:
            base, count, image = before
            if count >= self.whole_first:
                changes = self._patched(bucket, image, packed, place or self._fresh)
            if changes is None:
                self._replace(image, packed)
        self._sent[bucket.index] = version, count + 1, image
        if changes is not None:
            return changes, base
        if place is None:
            return image, None
        whole = place(bucket.size_bytes)
        whole[:] = image
        return whole, None

    def close(self) -> None:
        """Let go of what is kept; nothing is encoded any more."""
        self._sent.clear()

    @abstractmethod
    def _kept(self, packed: PackedT) -> SentT:
        """A bucket as it is sent for the first time, which is changed with every version."""

    @abstractmethod
    def _replace(self, image: SentT, packed: PackedT) -> None:
        """Bring what is kept up to date with a bucket that travels whole."""

    @abstractmethod
    def _patched(self, bucket: Bucket, image: SentT, packed: PackedT, place: Callable[[int], SentT]) -> SentT | None:
        """The changes from ``image`` to ``packed``, in ``place``, with ``image`` brought up to date.

        None, and ``image`` as it was: there are more of them than ``changes.most_changes`` allows.
        """

    @abstractmethod
    def _fresh(self, size_bytes: int) -> SentT:
        """Memory for what travels, shape (size_bytes,) uint8."""


class DeltaEncoder(BaseDeltaEncoder[ByteArray, ByteArray]):
    """In host memory, by numpy: on one core torch takes 1.6 to 9 times as long to find the changes."""

    def __init__(self, dense_above: float) -> None:
        """As of the base class."""
        super().__init__(dense_above)
        self._packed = self._fresh(0)

    def room(self, bucket: Bucket) -> ByteArray:
        """See the base class; the memory is used again, for the next bucket as well."""
        if bucket.index not in self._sent:  # it stays as what was sent
            return self._fresh(bucket.size_bytes)
        if self._packed.size < bucket.size_bytes:
            self._packed = self._fresh(bucket.size_bytes)
        packed = self._packed[: bucket.size_bytes]
        clear_gaps(bucket, packed)
        return packed

    def _kept(self, packed: ByteArray) -> ByteArray:
        return packed

    def _replace(self, image: ByteArray, packed: ByteArray) -> None:
        image[:] = packed

    def _fresh(self, size_bytes: int) -> ByteArray:
        return np.zeros(size_bytes, dtype=np.uint8)

    def _patched(self, bucket: Bucket, image: ByteArray, packed: ByteArray, place: Callable[[int], ByteArray]) -> ByteArray | None:
        number, index = UNSIGNED[number_bytes(bucket)], index_type(bucket)
        changed = changed_numbers(image, packed, number, most_changes(bucket, self._dense_above))
        if changed is None:
            return None
        values = packed.view(number)[changed]
        image.view(number)[changed] = values
        sparse = place(changed.size * (index.itemsize + number.itemsize))
        sparse[: changed.size * index.itemsize].view(index)[:] = changed
        sparse[changed.size * index.itemsize :].view(number)[:] = values
        return sparse


def changed_numbers(old: ByteArray, new: ByteArray, number: np.dtype[Any], limit: int) -> Indexes | None:
    """Indexes of the numbers that differ, in order; None where they are more than ``limit``.

    Args:
        old: shape (B,), contiguous.
        new: of the same shape.
        number: unsigned, by whose size B can be divided.
        limit: looking ends with it.
    """
    per_word = WORD_BYTES // number.itemsize
    whole = old.size // WORD_BYTES * WORD_BYTES
    words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    numbers = old[:whole].view(number), new[:whole].view(number)
    found: list[tuple[int, Indexes | None]] = []  # first number of a piece, and what differs in it; None: many do, looked at below
    count = 0
    for first in range(0, whole // WORD_BYTES, PIECE_WORDS):
        before, after = (side[first : first + PIECE_WORDS] for side in words)
        differ = before != after
        num_words = np.count_nonzero(differ)
        if not num_words:
            continue
        start = first * per_word
        if num_words * FEW > differ.size:
            count += int(np.count_nonzero(np.not_equal(*_piece(numbers, start, differ.size * per_word))))
            found.append((start, None))
        else:
            where = np.flatnonzero(differ)
            parts = np.flatnonzero((before[where] ^ after[where]).view(number))
            count += parts.size
            found.append((start, where[parts // per_word] * per_word + parts % per_word))
        if count > limit:
            return None
    rest = np.flatnonzero(old[whole:].view(number) != new[whole:].view(number))
    if count + rest.size > limit:
        return None
    found.append((whole // number.itemsize, rest))
    indexes = np.empty(count + rest.size, dtype=np.int64)
    cursor = 0
    for start, inside in found:
        if inside is None:
            inside = np.flatnonzero(np.not_equal(*_piece(numbers, start, PIECE_WORDS * per_word)))
        np.add(inside, start, out=indexes[cursor : cursor + inside.size])
        cursor += inside.size
    return indexes


def _piece(numbers: tuple[npt.NDArray[Any], npt.NDArray[Any]], start: int, length: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    return numbers[0][start : start + length], numbers[1][start : start + length]


class Images:
    """Of an engine: every bucket as it came last, unless the engine's parameters alone have what is in it (``drop``)."""

    def __init__(self, owner: str | None = None) -> None:
        """``owner``: name of the engine's copies, where each of its processes fetches buckets by itself (``copies``); None: bytes come."""
        self._owner = owner
        self._held: dict[int, tuple[int, ByteArray | None]] = {}
        self._dropped: set[int] = set()

    def drop(self, buckets: Collection[int]) -> None:
        """Keep no copy of these buckets from now on: what changes of them is handed over, and no whole one can be had."""
        self._dropped |= set(buckets)
        for index in self._dropped & self._held.keys():
            self._held[index] = self._held[index][0], None

    @property
    def in_processes(self) -> bool:
        """Whether buckets come to the engine's processes, which keep the copies; here are their versions alone."""
        return self._owner is not None

    @property
    def size_bytes(self) -> int:
        """Of all copies here."""
        return sum(image.size for _, image in self._held.values() if image is not None)

    def take(self, bucket: Bucket, parcel: Parcel) -> Held | Kept:
        """A bucket in all forms that there are of it; errors are those of :meth:`apply`."""
        if self._owner is not None and isinstance(parcel.payload, Remote):
            self._check(bucket, parcel)
            self._held[bucket.index] = parcel.version, None
            return Kept(owner=self._owner, bucket=bucket, version=parcel.version, base=parcel.base, arriving=parcel.payload)
        image = self.apply(bucket, parcel)
        payload = parcel.payload
        if isinstance(payload, np.ndarray) and payload.flags.writeable:
            payload = payload.copy()
        if parcel.base is None:
            return Held(whole=payload if image is None else image)
        return Held(whole=image, changes=payload, base=parcel.base)

    def apply(self, bucket: Bucket, parcel: Parcel) -> ByteArray | None:
        """The whole bucket after a parcel; read-only, and changed by the next one. None: no copy of it is kept.

        Raises:
            WholeNeededError: it changes a version that is not here.
        """
        data = view(parcel.payload)
        held = self._check(bucket, parcel)
        if bucket.index in self._dropped:
            self._held[bucket.index] = parcel.version, None
            return None
        image = None if held is None else held[1]
        if parcel.base is None:
            image = image if image is not None and image.size == data.size else np.empty(data.size, dtype=np.uint8)
            image[:] = data
        else:
            assert image is not None  # only of dropped buckets
            changed, numbers = split_changes(bucket, data)
            image.view(numbers.dtype)[changed] = numbers
        self._held[bucket.index] = parcel.version, image
        shown = image.view()
        shown.flags.writeable = False
        return shown

    def _check(self, bucket: Bucket, parcel: Parcel) -> tuple[int, ByteArray | None] | None:
        """What is here of a bucket, which has to be what a parcel changes."""
        held = self._held.get(bucket.index)
        if parcel.base is not None and (held is None or held[0] != parcel.base):
            found = "none" if held is None else f"v{held[0]}"
            raise WholeNeededError(
                f"bucket {bucket.index} has the changes from weights v{parcel.base} to v{parcel.version}, "
                f"and this engine has {found} of it; send it whole"
            )
        return held
