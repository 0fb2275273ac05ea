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
from rljob_runtime.weightsync.changes import index_type, number_bytes, split_changes
from rljob_runtime.weightsync.packing import DTYPE_BYTES, as_byte_array, as_byte_tensor, unpack

ByteArray = npt.NDArray[np.uint8]
Indexes = npt.NDArray[np.unsignedinteger[Any]]
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

    @property
    def shift(self) -> int | None:
        """What places in target and source differ by; None: it is not the same for all numbers."""
        if self.source_strides in ((), (1,)) and self.target_strides in ((), (1,)):
            return self.target_offset - self.source_offset
        return None

    def locate(self, indexes: torch.Tensor, begin: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Where numbers of the source are in the target.

        Args:
            indexes: int64, shape (n,), between ``source_offset`` and ``source_end``, all of them after ``begin`` is subtracted.
            begin: index of the source's first number.

        Returns:
            Which of them are in the region (bool, shape (n,)), and of these the places in the target.
        """
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
    found = [(name, parameter, region) for name, own in places.items() for parameter, region in own]
    writer = ChangeWriter(bucket, [(name, region) for name, _, region in found])
    writer.write([parameter for _, parameter, _ in found], changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Numbers of a bucket among which are those of a region."""

    number: int
    """Of the region, and of its parameter, as they are given."""
    units: Region
    """In numbers by which the bucket is compared."""
    begin: int
    """Index, in the bucket, of the first number of the region's tensor."""
    bounds: tuple[int, int]
    """Index, in the bucket, of its first number, and of the one behind its last."""
    shift: int | None
    """What a number's index in the bucket and its place in the parameter differ by; None: it is not the same for all."""

    @classmethod
    def of(cls, number: int, units: Region, begin: int) -> _Span:
        bounds = begin + units.source_offset, begin + units.source_end
        return cls(number=number, units=units, begin=begin, bounds=bounds, shift=None if units.shift is None else units.shift - begin)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceSpans:
    """Spans whose parameters are on one device, and what is computed with there."""

    shifted: Sequence[_Span]
    """In order, none of them overlapping, each with a shift."""
    others: Sequence[_Span]
    bounds: torch.Tensor
    """Of the first, then of the others, shape (2 n,)."""
    starts: torch.Tensor
    shifts: torch.Tensor
    """Of the first alone."""


class ChangeWriter:
    """Writes what changed in one bucket into parameters: all that follows from the layout is found once, and used for every update."""

    def __init__(self, bucket: Bucket, regions: Sequence[tuple[str, Region]]) -> None:
        """Find where numbers go.

        Args:
            bucket: its layout.
            regions: each with the name of its tensor, in the order in which parameters will be given; those of tensors that are not in the
                bucket are left out.
        """
        self._bucket = bucket
        self._size = number_bytes(bucket)
        slots = {slot.name: slot for slot in bucket.slots}
        spans = [
            _Span.of(number, region.split(DTYPE_BYTES[slots[name].dtype] // self._size), slots[name].offset_bytes // self._size)
            for number, (name, region) in enumerate(regions)
            if name in slots
        ]
        self._spans = sorted(spans, key=lambda span: span.bounds)
        self._devices: tuple[torch.device, ...] = ()
        self._on: dict[torch.device, _DeviceSpans] = {}

    def write(self, parameters: Sequence[torch.Tensor], changes: ByteArray | torch.Tensor) -> None:
        """Write; ``changes`` as of :func:`write_changes`, ``parameters`` in the order of the regions."""
        if isinstance(changes, torch.Tensor) and changes.device.type == "cpu":
            changes = changes.numpy()
        if isinstance(changes, np.ndarray) and all(parameter.device.type == "cpu" for parameter in parameters):
            self._write_in_host_memory(parameters, changes)
        else:
            self.write_on_device(parameters, as_byte_tensor(changes) if isinstance(changes, np.ndarray) else changes)

    def _write_in_host_memory(self, parameters: Sequence[torch.Tensor], changes: ByteArray) -> None:
        """By numpy, which takes two thirds of torch's time here."""
        indexes, values = split_changes(self._bucket, changes)
        where = indexes.astype(np.int64)
        for span, first, end in zip(self._spans, *self._cuts(indexes), strict=True):
            if first == end:
                continue
            numbers, shift = values[first:end], span.shift
            if shift is None:
                inside, places = span.units.locate(torch.from_numpy(where[first:end]), span.begin)
                numbers, target = numbers[inside.numpy()], places.numpy()
            else:
                target = where[first:end] + shift
            as_byte_array(_units(parameters[span.number], self._size).view(torch.uint8)).view(values.dtype)[target] = numbers

    def _cuts(self, indexes: Indexes) -> tuple[list[int], list[int]]:
        """Where the indexes of each span begin and end; sought in their type, or all would be converted."""
        first = np.array([span.bounds[0] for span in self._spans], dtype=indexes.dtype)
        last = np.array([span.bounds[1] - 1 for span in self._spans], dtype=indexes.dtype)
        return np.searchsorted(indexes, first).tolist(), np.searchsorted(indexes, last, side="right").tolist()

    def write_on_device(self, parameters: Sequence[torch.Tensor], changes: torch.Tensor) -> None:
        """:meth:`write` by torch alone, on the devices of the parameters; ``changes`` is a flat uint8 tensor.

        Only the bounds of regions come to the host. Each region takes one call of torch, as its calls are what small updates take.
        """
        devices = tuple(parameter.device for parameter in parameters)
        if devices != self._devices:
            self._devices, self._on = devices, {device: self._spans_on(device, devices) for device in set(devices)}
        for device, spans in self._on.items():
            self._write_on_one(parameters, spans, changes.to(device))

    def _spans_on(self, device: torch.device, devices: Sequence[torch.device]) -> _DeviceSpans:
        shifted: list[_Span] = []
        others: list[_Span] = []
        for span in self._spans:
            if devices[span.number] == device:
                follows = not shifted or shifted[-1].bounds[1] <= span.bounds[0]
                (shifted if follows and span.shift is not None else others).append(span)
        kind = torch.int32 if self._is_in_32_bits else torch.int64
        return _DeviceSpans(
            shifted=shifted,
            others=others,
            bounds=torch.tensor([bound for span in (*shifted, *others) for bound in span.bounds], dtype=kind, device=device),
            starts=torch.tensor([span.bounds[0] for span in shifted], dtype=kind, device=device),
            shifts=torch.tensor([span.shift for span in shifted], dtype=torch.int64, device=device),
        )

    @property
    def _is_in_32_bits(self) -> bool:
        """Whether indexes are in order as signed numbers of 32 bits."""
        return index_type(self._bucket).itemsize == 4 and self._bucket.size_bytes // self._size < 2**31

    def _write_on_one(self, parameters: Sequence[torch.Tensor], spans: _DeviceSpans, changes: torch.Tensor) -> None:
        indexes, values = split_on_device(self._bucket, changes)
        if indexes.dtype == torch.int32 and not self._is_in_32_bits:
            indexes = indexes.to(torch.int64) & LOW_32_BITS
        cuts = torch.searchsorted(indexes, spans.bounds).tolist()
        found = list(zip((*spans.shifted, *spans.others), cuts[::2], cuts[1::2], strict=True))
        shifted = [
            (_units(parameters[span.number], self._size), start, stop) for span, start, stop in found[: len(spans.shifted)] if start < stop
        ]
        if shifted:
            for first in range(shifted[0][1], shifted[-1][2], WRITTEN):
                end = min(first + WRITTEN, shifted[-1][2])
                target = indexes[first:end].to(torch.int64)
                target += spans.shifts[torch.bucketize(indexes[first:end], spans.starts, right=True) - 1]
                for units, start, stop in shifted:
                    begin, behind = max(start, first), min(stop, end)
                    if begin < behind:
                        units.index_copy_(0, target[begin - first : behind - first], values[begin:behind])
        for span, start, stop in found[len(spans.shifted) :]:
            units = _units(parameters[span.number], self._size)
            for first in range(start, stop, WRITTEN):
                end = min(first + WRITTEN, stop)
                inside, target = span.units.locate(indexes[first:end].to(torch.int64), span.begin)
                units.index_copy_(0, target, values[first:end][inside])


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
    each = parameter.element_size()
    begin, end = parameter.storage_offset() * each // size, parameter.untyped_storage().nbytes() // size
    return parameter.view(INTEGERS[size]).as_strided((end - begin,), (1,)) if each == size else _smaller(parameter, size)


def _smaller(parameter: torch.Tensor, size: int) -> torch.Tensor:
    """The same for integers that are smaller than its numbers."""
    whole = torch.empty(0, dtype=torch.uint8, device=parameter.device).set_(parameter.untyped_storage())
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
