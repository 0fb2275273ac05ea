"""Sparse syncs of buckets that travel between devices: what ``delta`` does in host memory, where the bucket is.

A sender keeps the last bucket that it sent on its device, in the engine's dtype. What differs is found and gathered there; nothing but
counts comes to the host. Numbers are compared a piece at a time, which bounds what that takes beside the bucket.

Engines get the first two versions whole: of the first one they see how it goes into their parameters, and the second one proves that. In
host memory engines have a copy for the proof; beside the model, there is no room for one on a device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.changes import index_type, most_changes, number_bytes
from rljob_runtime.weightsync.delta import BaseDeltaEncoder
from rljob_runtime.weightsync.patching import INTEGERS

PIECE_NUMBERS = 1 << 22
"""Compared at a time; where all differ, their indexes take 32 MiB."""


class DeviceDeltaEncoder(BaseDeltaEncoder[torch.Tensor, torch.Tensor]):
    """On a device, by torch; between two syncs it holds nothing but what was sent."""

    whole_first = 2

    def __init__(self, dense_above: float, device: torch.device) -> None:
        """``dense_above`` as of the base class; ``device``: of all buckets."""
        self._device = device
        super().__init__(dense_above)

    def room(self, bucket: Bucket) -> torch.Tensor:
        """See the base class."""
        return self._fresh(bucket.size_bytes)

    def _kept(self, packed: torch.Tensor) -> torch.Tensor:
        return packed

    def _replace(self, image: torch.Tensor, packed: torch.Tensor) -> None:
        image.copy_(packed)

    def _fresh(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)

    def _patched(
        self, bucket: Bucket, image: torch.Tensor, packed: torch.Tensor, place: Callable[[int], torch.Tensor]
    ) -> torch.Tensor | None:
        changes = changed_on_device(bucket, image, packed, most_changes(bucket, self._dense_above), place)
        if changes is not None:
            image.copy_(packed)
        return changes


def changed_on_device(
    bucket: Bucket, old: torch.Tensor, new: torch.Tensor, limit: int, place: Callable[[int], torch.Tensor]
) -> torch.Tensor | None:
    """The numbers that differ, in the format of ``changes``; None where they are more than ``limit``.

    Args:
        bucket: the layout of both sides.
        old: flat uint8, shape (bucket.size_bytes,).
        new: the same, on the same device.
        limit: looking ends with it.
        place: makes memory of so many bytes for them.
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
    found = [*indexes, *values]
    changes = place(sum(part.numel() for part in found))
    return torch.cat(found, out=changes) if found else changes
