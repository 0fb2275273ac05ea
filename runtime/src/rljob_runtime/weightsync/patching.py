"""Changed numbers of checkpoint tensors written straight into a model's parameters.

::

    checkpoint tensor [  q  ]──Region──┐
    checkpoint tensor [  k  ]──Region──┼──> parameter [ q | k | v | padding ]
    checkpoint tensor [  v  ]──Region──┘

A region says which numbers of a checkpoint tensor a parameter has, and where: element (i, j, ...) of both is the same number. Fused
projections, shards of tensor parallelism, padded vocabularies and stacked experts are all regions. Where they come from is the engine's
business (``engine.vllm.load_record``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.delta import between, number_bytes, split_changes
from rljob_runtime.weightsync.packing import DTYPE_BYTES, as_byte_tensor, unpack

ByteArray = npt.NDArray[np.uint8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by which numbers are written and compared, by bytes."""
LOW_32_BITS = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Offsets and strides are in numbers; the target's count from the first number of the parameter."""

    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]

    @classmethod
    def of(
        cls, shape: Sequence[int], source_offset: int, source_strides: Sequence[int], target_offset: int, target_strides: Sequence[int]
    ) -> Region | None:
        """The region with as few dimensions as possible; None where an index in the source does not tell the place in it."""
        found = sorted(
            ((n, s, t) for n, s, t in zip(shape, source_strides, target_strides, strict=True) if n != 1),
            key=lambda dim: dim[1],
            reverse=True,
        )
        merged: list[tuple[int, int, int]] = []
        for n, s, t in found:
            if merged and merged[-1][1] == n * s and merged[-1][2] == n * t:
                n *= merged.pop()[0]
            merged.append((n, s, t))
        reach = 0  # of the dimensions inside, in the source
        for n, s, _ in reversed(merged):
            if s <= reach:
                return None
            reach += (n - 1) * s
        return cls(
            shape=tuple(n for n, _, _ in merged),
            source_offset=source_offset,
            source_strides=tuple(s for _, s, _ in merged),
            target_offset=target_offset,
            target_strides=tuple(t for _, _, t in merged),
        )

    @property
    def numel(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    def split(self, parts: int) -> Region:
        """The same in numbers of which each old one is ``parts``."""
        if parts == 1:
            return self
        made = Region.of(
            (*self.shape, parts),
            self.source_offset * parts,
            (*(s * parts for s in self.source_strides), 1),
            self.target_offset * parts,
            (*(t * parts for t in self.target_strides), 1),
        )
        assert made is not None
        return made

    @property
    def source_end(self) -> int:
        """Behind the last number in the source."""
        return self.source_offset + 1 + sum((n - 1) * s for n, s in zip(self.shape, self.source_strides, strict=True))

    def locate(self, indexes: torch.Tensor, begin: int = 0) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Where numbers of the source are in the target.

        Args:
            indexes: int64, shape (n,), between ``source_offset`` and ``source_end``, all of them after ``begin`` is subtracted.
            begin: index of the source's first number.

        Returns:
            Which of them are in the region (bool, shape (n,); None: all), and of these the places in the target.
        """
        if self.source_strides in ((), (1,)) and self.target_strides in ((), (1,)):
            return None, indexes + (self.target_offset - self.source_offset - begin)
        rest = indexes - (self.source_offset + begin)
        inside = torch.ones_like(rest, dtype=torch.bool)
        target = torch.full_like(rest, self.target_offset)
        for n, s, t in zip(self.shape, self.source_strides, self.target_strides, strict=True):
            place = torch.div(rest, s, rounding_mode="floor")
            rest = rest - place * s
            inside &= place < n
            target += place * t
        inside &= rest == 0
        return inside, target[inside]

    def in_source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its view of a whole, contiguous checkpoint tensor."""
        return tensor.as_strided(self.shape, self.source_strides, tensor.storage_offset() + self.source_offset)

    def in_target(self, parameter: torch.Tensor) -> torch.Tensor:
        """Its view of a parameter."""
        return parameter.as_strided(self.shape, self.target_strides, parameter.storage_offset() + self.target_offset)


Places = Mapping[str, Sequence[tuple[torch.Tensor, Region]]]
"""By checkpoint tensor: the parameters that have numbers of it, of its dtype, and which."""


def write_changes(places: Places, bucket: Bucket, changes: ByteArray) -> None:
    """Write what changed in a bucket; tensors that are not in ``places`` are left out.

    Args:
        places: where numbers go.
        bucket: its layout.
        changes: shape (B,), of :meth:`~rljob_runtime.weightsync.delta.DeltaEncoder.encode`: n ascending indexes, then n numbers.
    """
    size = number_bytes(bucket)
    indexes, values = split_changes(bucket, changes)
    on_device: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
    for slot in bucket.slots:
        begin = slot.offset_bytes // size
        for parameter, region in places.get(slot.name, ()):
            units = region.split(DTYPE_BYTES[slot.dtype] // size)
            first, end = between(indexes, begin + units.source_offset, begin + units.source_end)
            if first == end:
                continue
            if parameter.device not in on_device:
                on_device[parameter.device] = _uploaded(indexes, values, size, parameter.device)
            where, numbers = (side[first:end] for side in on_device[parameter.device])
            inside, target = units.locate(where, begin)
            if inside is not None:
                numbers = numbers[inside]
            if parameter.device.type == "cpu":  # numpy takes two thirds of torch's time here
                _units(parameter, size).numpy()[target.numpy()] = numbers.numpy()
            else:
                _units(parameter, size).index_copy_(0, target, numbers)


def _uploaded(
    indexes: npt.NDArray[np.unsignedinteger[Any]], values: npt.NDArray[np.unsignedinteger[Any]], size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indexes as int64 and values as integers of ``size`` bytes, on a device."""
    where = as_byte_tensor(indexes.view(np.uint8)).view(INTEGERS[indexes.itemsize]).to(device).to(torch.int64)
    if indexes.itemsize == 4:
        where &= LOW_32_BITS
    return where, as_byte_tensor(values.view(np.uint8)).view(INTEGERS[size]).to(device)


def _units(parameter: torch.Tensor, size: int) -> torch.Tensor:
    """All memory from the first number of a parameter on, as integers of ``size`` bytes."""
    storage = parameter.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=parameter.device).set_(storage)
    return whole[parameter.storage_offset() * parameter.element_size() :].view(INTEGERS[size])


def write_whole(places: Places, bucket: Bucket, data: torch.Tensor) -> None:
    """Write a whole bucket, shape (bucket.size_bytes,) uint8; tensors that are not in ``places`` are left out."""
    for name, tensor in unpack(bucket, data):
        for parameter, region in places.get(name, ()):
            region.in_target(parameter).copy_(region.in_source(tensor))


def different(places: Places, bucket: Bucket, data: torch.Tensor) -> list[str]:
    """Names of tensors of a bucket, shape (bucket.size_bytes,) uint8, of which a parameter has other bits."""
    found = []
    for name, tensor in unpack(bucket, data):
        integers = INTEGERS[tensor.element_size()]
        for parameter, region in places.get(name, ()):
            source = region.in_source(tensor).to(parameter.device)
            if not torch.equal(source.view(integers), region.in_target(parameter).view(integers)):
                found.append(name)
                break
    return found
