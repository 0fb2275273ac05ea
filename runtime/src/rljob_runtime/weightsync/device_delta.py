"""Sparse syncs of buckets that travel between devices: what ``delta`` does in host memory, where the bucket is.

A sender keeps the last bucket that it sent on its device, in the engine's dtype. What differs is found and gathered there, in the same
format and by the same decisions (``changes``); nothing but counts comes to the host. Numbers are compared a piece at a time, which bounds
what that takes beside the bucket.

Engines get the first :data:`WHOLE_FIRST` versions whole: of the first one they see how it goes into their parameters, and the second one
proves that. In host memory engines have a copy for the proof; beside the model, there is no room for one on a device.
"""

from __future__ import annotations

import torch

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.changes import index_type, most_changes, number_bytes
from rljob_runtime.weightsync.patching import INTEGERS

PIECE_NUMBERS = 1 << 22
"""Compared at a time; where all differ, their indexes take 32 MiB."""
WHOLE_FIRST = 2


class DeviceDeltaEncoder:
    """Of a sender; keeps every bucket that it encoded."""

    def __init__(self, dense_above: float, device: torch.device) -> None:
        """Nothing was sent.

        Args:
            dense_above: part of a bucket's numbers from which on it travels whole.
            device: of all buckets.
        """
        self._dense_above = dense_above
        self._device = device
        self._sent: dict[int, tuple[int, torch.Tensor]] = {}
        self._versions: dict[int, int] = {}
        """Sent of each bucket."""
        self._packed = self._zeros(0)

    def room(self, bucket: Bucket) -> torch.Tensor:
        """Where the bucket has to be packed before it is encoded, shape (bucket.size_bytes,); gaps between its slots are zeros."""
        if bucket.index not in self._sent:
            return self._zeros(bucket.size_bytes)
        if self._packed.numel() < bucket.size_bytes:
            self._packed = self._zeros(bucket.size_bytes)
        return self._packed[: bucket.size_bytes].zero_()

    def encode(self, version: int, bucket: Bucket, packed: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """What has to travel, and the version that it changes; None: all of it.

        Args:
            version: of the weights.
            bucket: its layout.
            packed: the tensor of :meth:`room`.

        Returns:
            uint8, flat: the changes in memory of their own, see ``changes``; or the whole bucket, which stays as it is until this bucket is
            encoded again.
        """
        count = self._versions.get(bucket.index, 0)
        self._versions[bucket.index] = count + 1
        before = self._sent.get(bucket.index)
        if before is None:
            self._sent[bucket.index] = version, packed
            return packed, None
        base, image = before
        self._sent[bucket.index] = version, image
        found = None if count < WHOLE_FIRST else changed_on_device(bucket, image, packed, most_changes(bucket, self._dense_above))
        image.copy_(packed)
        return (image, None) if found is None else (found, base)

    def _zeros(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)


def changed_on_device(bucket: Bucket, old: torch.Tensor, new: torch.Tensor, limit: int) -> torch.Tensor | None:
    """The numbers that differ, in the format of ``changes``; None where they are more than ``limit``.

    Args:
        bucket: the layout of both sides.
        old: flat uint8, shape (bucket.size_bytes,).
        new: the same, on the same device.
        limit: looking ends with it.
    """
    number, index = INTEGERS[number_bytes(bucket)], INTEGERS[index_type(bucket).itemsize]
    before, after = old.view(number), new.view(number)
    indexes: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    count = 0
    for first in range(0, before.numel(), PIECE_NUMBERS):
        piece = after[first : first + PIECE_NUMBERS]
        where = torch.nonzero(before[first : first + PIECE_NUMBERS] != piece).flatten()
        count += where.numel()
        if count > limit:
            return None
        values.append(piece[where].view(torch.uint8))
        indexes.append(where.add_(first).to(index).view(torch.uint8))  # from 2**31 on negative: the same bits
    return torch.cat([*indexes, *values]) if indexes else new[:0]
