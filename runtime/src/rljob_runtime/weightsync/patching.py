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

import numpy as np
import numpy.typing as npt
import torch

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.changes import between, index_type, number_bytes, split_changes
from rljob_runtime.weightsync.packing import DTYPE_BYTES, as_byte_tensor, unpack

ByteArray = npt.NDArray[np.uint8]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types by which numbers are written and compared, by bytes."""
LOW_32_BITS = 0xFFFF_FFFF
WRITTEN = 1 << 22
"""Numbers written at a time on a device: what their places take is 50 bytes each."""


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


def write_changes(places: Places, bucket: Bucket, changes: ByteArray | torch.Tensor) -> None:
    """Write what changed in a bucket; tensors that are not in ``places`` are left out.

    Args:
        places: where numbers go.
        bucket: its layout.
        changes: shape (B,) uint8, in the format of :mod:`~rljob_runtime.weightsync.changes`; an array, or a tensor on any device.
    """
    spans = _spans(places, bucket)
    if isinstance(changes, torch.Tensor) and changes.device.type == "cpu":
        changes = changes.numpy()
    if isinstance(changes, np.ndarray) and all(span.parameter.device.type == "cpu" for span in spans):
        _write_in_host_memory(spans, bucket, changes)
    else:
        write_on_device(places, bucket, as_byte_tensor(changes) if isinstance(changes, np.ndarray) else changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Numbers of a bucket among which are those of a region."""

    parameter: torch.Tensor
    units: Region
    """In numbers by which the bucket is compared."""
    begin: int
    """Index, in the bucket, of the first number of the region's tensor."""

    @property
    def bounds(self) -> tuple[int, int]:
        """Index of its first number in the bucket, and of the one behind its last."""
        return self.begin + self.units.source_offset, self.begin + self.units.source_end


def _spans(places: Places, bucket: Bucket) -> list[_Span]:
    size = number_bytes(bucket)
    return [
        _Span(parameter=parameter, units=region.split(DTYPE_BYTES[slot.dtype] // size), begin=slot.offset_bytes // size)
        for slot in bucket.slots
        for parameter, region in places.get(slot.name, ())
    ]


def _write_in_host_memory(spans: Sequence[_Span], bucket: Bucket, changes: ByteArray) -> None:
    """By numpy, which takes two thirds of torch's time here."""
    size = number_bytes(bucket)
    indexes, values = split_changes(bucket, changes)
    where = as_byte_tensor(indexes.view(np.uint8)).view(INTEGERS[indexes.itemsize]).to(torch.int64)
    if indexes.itemsize == 4:
        where &= LOW_32_BITS
    for span in spans:
        first, end = between(indexes, *span.bounds)
        if first == end:
            continue
        inside, target = span.units.locate(where[first:end], span.begin)
        numbers = values[first:end] if inside is None else values[first:end][inside.numpy()]
        _units(span.parameter, size).numpy().view(values.dtype)[target.numpy()] = numbers


def write_on_device(places: Places, bucket: Bucket, changes: torch.Tensor) -> None:
    """:func:`write_changes` by torch alone, on the devices of the parameters; ``changes`` is a flat uint8 tensor.

    Only the bounds of regions come to the host. Indexes are converted and places computed for :data:`WRITTEN` numbers at a time.
    """
    by_device: dict[torch.device, list[_Span]] = {}
    for span in _spans(places, bucket):
        by_device.setdefault(span.parameter.device, []).append(span)
    for device, spans in by_device.items():
        _write_on_one(spans, bucket, changes.to(device))


def _write_on_one(spans: Sequence[_Span], bucket: Bucket, changes: torch.Tensor) -> None:
    size = number_bytes(bucket)
    indexes, values = split_on_device(bucket, changes)
    if indexes.dtype == torch.int32 and bucket.size_bytes // size >= 2**31:
        indexes = indexes.to(torch.int64) & LOW_32_BITS  # or those with the highest bit would be negative, and out of order
    bounds = torch.tensor([bound for span in spans for bound in span.bounds], dtype=indexes.dtype, device=changes.device)
    cuts = torch.searchsorted(indexes, bounds).tolist()
    for span, start, stop in zip(spans, cuts[::2], cuts[1::2], strict=True):
        units = _units(span.parameter, size)
        for first in range(start, stop, WRITTEN):
            end = min(first + WRITTEN, stop)
            inside, target = span.units.locate(indexes[first:end].to(torch.int64), span.begin)
            numbers = values[first:end] if inside is None else values[first:end][inside]
            units.index_copy_(0, target, numbers)


def split_on_device(bucket: Bucket, changes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``changes.split_changes`` of a flat uint8 tensor: the same bits as signed integers, both of shape (n,)."""
    size, index = number_bytes(bucket), index_type(bucket).itemsize
    end = changes.numel() // (index + size) * index
    return _as_integers(changes[:end], index), _as_integers(changes[end:], size)


def _as_integers(data: torch.Tensor, size: int) -> torch.Tensor:
    """Flat bytes as integers, copied where they do not begin where an integer can: 8-byte numbers behind an odd number of indexes."""
    fits = int(data.storage_offset()) % size == 0 and data.data_ptr() % size == 0
    return (data if fits else data.clone()).view(INTEGERS[size])


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
