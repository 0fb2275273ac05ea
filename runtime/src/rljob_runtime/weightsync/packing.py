"""Packed buckets: how named tensors lie in flat byte buffers, and the way in and out.

Called by the trainer side (``plan_buckets`` once, ``pack`` per update) and by the engines (``unpack``); it produces
``WeightManifest`` objects, both sides' only agreement about layout. Planning is plain Python; torch is imported only to move data.

Invariants (property tests): the slots of a bucket are disjoint, aligned and inside the bucket; every tensor lies in exactly one
slot; pack then unpack gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, TensorSlot, WeightManifest

if TYPE_CHECKING:
    import torch

ByteArray = npt.NDArray[np.uint8]

DEFAULT_ALIGN_BYTES = 64
"""One cache line, and a multiple of every element size, so that typed views are always possible."""

PIECE_BYTES = 2 << 20
"""Copied at a time where what was copied is read again: what the caches hold, and no less, see ``parcel.BLOCK_BYTES``."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype that can travel; keys are torch dtypes without the prefix."""


def plan_buckets(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], bucket_bytes: int, align: int = DEFAULT_ALIGN_BYTES
) -> WeightManifest:
    """Lay tensors out in buckets of at most ``bucket_bytes``.

    Tensors of one decoder layer (outermost integer in the name) stay in one bucket unless the layer is larger than a bucket, so that
    an engine can finish a layer with what one bucket brings. A tensor larger than ``bucket_bytes`` gets a bucket of its own.

    Args:
        tensors: (Hugging Face name, dtype without ``torch.``, full shape) of each parameter.
        bucket_bytes: upper bound of a bucket, except for a single larger tensor.
        align: bytes; every slot starts at a multiple of it.

    Returns:
        The manifest; buckets are indexed 0, 1, ... in order of sending.

    Raises:
        WeightSyncError: nothing to send, a repeated name, an unknown dtype, a negative extent, or sizes that are not positive.
    """
    if bucket_bytes < 1 or align < 1:
        raise WeightSyncError(f"plan_buckets: bucket_bytes={bucket_bytes} and align={align} must both be at least 1; raise them")
    sizes = {name: tensor_bytes(name, dtype, shape) for name, dtype, shape in tensors}
    if not tensors or len(sizes) != len(tensors):
        raise WeightSyncError(f"plan_buckets: {len(tensors)} tensors with {len(sizes)} distinct names; pass each parameter exactly once")
    by_name = {name: (dtype, tuple(shape)) for name, dtype, shape in tensors}

    finished: list[list[tuple[str, int]]] = []  # one list of (name, offset) per bucket
    current: list[tuple[str, int]] = []
    used = 0
    for group in layer_groups([name for name, _, _ in tensors]):
        group_end = used
        for name in group:
            group_end = _aligned(group_end, align) + sizes[name]
        if current and group_end > bucket_bytes:
            finished.append(current)
            current, used = [], 0
        for name in group:
            offset = _aligned(used, align)
            if current and offset + sizes[name] > bucket_bytes:
                finished.append(current)
                current, offset = [], 0
            current.append((name, offset))
            used = offset + sizes[name]
    finished.append(current)

    return WeightManifest(buckets=tuple(_bucket(index, placed, by_name, sizes) for index, placed in enumerate(finished)))


def layer_groups(names: Sequence[str]) -> list[list[str]]:
    """Partition parameter names by decoder layer: the outermost integer segment of the name with what stands before it.

    Names without an integer (embeddings, final norm, head) form groups where they first appear. Order within a group is kept.
    The same rule as vLLM's ``layerwise_groups``: the expert index of a mixture-of-experts layer is not outermost.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parts = name.split(".")
        position = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = ("", name) if position is None else (".".join(parts[:position]), parts[position])
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of one contiguous tensor.

    Raises:
        WeightSyncError: the dtype cannot travel or an extent is negative.
    """
    if dtype not in DTYPE_BYTES:
        raise WeightSyncError(f"tensor {name} has dtype {dtype}; it must be one of {', '.join(DTYPE_BYTES)}: cast it before the sync")
    if any(extent < 0 for extent in shape):
        raise WeightSyncError(f"tensor {name} has shape {shape}; no extent may be negative")
    return math.prod(shape) * DTYPE_BYTES[dtype]


def pack(
    bucket: Bucket, tensors: Mapping[str, torch.Tensor], out: ByteArray | torch.Tensor, on_packed: Callable[[int], None] | None = None
) -> None:
    """Copy the bucket's tensors into ``out``, cast to the dtype of their slot where it differs.

    Args:
        bucket: what goes where.
        tensors: at least the bucket's names; any device, any strides.
        out: shape (bucket.size_bytes,) or longer, uint8, writable; on any device. Gaps between slots keep their old bytes.
        on_packed: called with the end of what is packed, which grows; on the host in pieces that a core's cache still has.

    Raises:
        WeightSyncError: a tensor is missing or has another shape than its slot, or ``out`` is too small.
    """
    size = out.size if isinstance(out, np.ndarray) else out.numel()
    if not str(out.dtype).endswith("uint8") or out.ndim != 1 or size < bucket.size_bytes:
        raise WeightSyncError(
            f"pack of bucket {bucket.index}: buffer is {out.dtype}{tuple(out.shape)}, needs uint8 with at least {bucket.size_bytes} bytes"
        )
    flat = as_byte_tensor(out) if isinstance(out, np.ndarray) else out
    for slot in bucket.slots:
        tensor = tensors.get(slot.name)
        if tensor is None:
            raise WeightSyncError(f"pack of bucket {bucket.index}: tensor {slot.name} is missing from what the trainer gave")
        if tuple(tensor.shape) != slot.shape:
            raise WeightSyncError(
                f"pack of bucket {bucket.index}: {slot.name} has shape {tuple(tensor.shape)} but the manifest says {slot.shape}; "
                "plan the manifest again from the current model"
            )
        if on_packed is None:
            _slot_view(flat, slot).copy_(tensor.detach())
        else:
            _pack_slot(flat, slot, tensor.detach(), on_packed)


def _pack_slot(flat: torch.Tensor, slot: TensorSlot, tensor: torch.Tensor, on_packed: Callable[[int], None]) -> None:
    """Copy one tensor; in pieces where one thread makes a plain copy, as several threads would share out a whole tensor."""
    import torch

    begin, end = slot.offset_bytes, slot.offset_bytes + slot.size_bytes
    is_plain = tensor.is_contiguous() and tensor.dtype == getattr(torch, slot.dtype) and tensor.device == flat.device
    if is_plain and flat.device.type == "cpu" and slot.size_bytes > PIECE_BYTES and torch.get_num_threads() == 1:
        source, target = as_byte_array(tensor.reshape(-1).view(torch.uint8)), flat.numpy()
        while begin + PIECE_BYTES < end:
            piece_end = begin + PIECE_BYTES
            target[begin:piece_end] = source[begin - slot.offset_bytes : piece_end - slot.offset_bytes]
            on_packed(piece_end)
            begin = piece_end
        target[begin:end] = source[begin - slot.offset_bytes :]
    else:
        _slot_view(flat, slot).copy_(tensor)
    on_packed(end)


def clear_gaps(bucket: Bucket, out: ByteArray) -> None:
    """Write zeros between the slots, so that a buffer used before has the bytes of a fresh one."""
    end = 0
    for slot in bucket.slots:
        out[end : slot.offset_bytes] = 0
        end = slot.offset_bytes + slot.size_bytes


def unpack(bucket: Bucket, data: ByteArray | torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, view) of each slot without copying.

    Views share memory with ``data`` and keep it alive. Do not write to them: the buffer may be read-only shared memory.

    Args:
        bucket: the layout.
        data: shape (bucket.size_bytes,) uint8; numpy (host) or torch (any device, 16-byte aligned).

    Raises:
        WeightSyncError: ``data`` has another size or dtype than the bucket says.
    """
    flat = as_byte_tensor(data) if isinstance(data, np.ndarray) else data
    if str(flat.dtype) != "torch.uint8" or flat.ndim != 1 or flat.numel() != bucket.size_bytes:
        raise WeightSyncError(
            f"bucket {bucket.index}: received {flat.dtype}{tuple(flat.shape)}, the manifest says {bucket.size_bytes} bytes of uint8"
        )
    for slot in bucket.slots:
        yield slot.name, _slot_view(flat, slot)


def as_byte_tensor(data: ByteArray) -> torch.Tensor:
    """The host array as a tensor on the same memory, also where it is read-only (Ray's object store, shared memory).

    ``torch.from_numpy`` warns about read-only arrays because torch cannot express them; every user here only reads.
    """
    import torch

    if data.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    if data.flags.writeable:
        return torch.from_numpy(data)
    return torch.from_numpy(np.asarray(_WritableFace(data)))


def as_byte_array(data: torch.Tensor) -> ByteArray:
    """The bytes of a flat uint8 tensor of the host's memory, shape (n,), not copied.

    ``Tensor.numpy`` makes the memory one that torch can never free while the tensor is there, which an engine that gives its weights back
    has to do.
    """
    return np.asarray(_TensorFace(data)) if data.numel() else np.empty(0, dtype=np.uint8)


class _TensorFace:
    """Presents a tensor's memory to numpy, and keeps it alive as the base of what numpy makes of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        address = (tensor.data_ptr(), False)
        self.__array_interface__ = {"data": address, "shape": (tensor.numel(),), "typestr": "|u1", "version": 3}


class _WritableFace:
    """Presents a read-only array as writable to numpy, and keeps it alive as the base of what numpy makes of it."""

    def __init__(self, array: ByteArray) -> None:
        interface: dict[str, Any] = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.array = array
        self.__array_interface__ = interface


def _slot_view(flat: torch.Tensor, slot: TensorSlot) -> torch.Tensor:
    """The slot's bytes as a tensor of its dtype and shape, on the memory of ``flat``."""
    import torch

    if slot.size_bytes == 0:  # an empty array has stride 0, which cannot be viewed as another dtype
        return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=flat.device)
    piece = flat[slot.offset_bytes : slot.offset_bytes + slot.size_bytes]
    typed: torch.Tensor = piece.view(getattr(torch, slot.dtype)).view(slot.shape)
    return typed


def _bucket(
    index: int, placed: Sequence[tuple[str, int]], by_name: Mapping[str, tuple[str, tuple[int, ...]]], sizes: Mapping[str, int]
) -> Bucket:
    """Build one bucket from its (name, offset) pairs."""
    slots = tuple(
        TensorSlot(name=name, dtype=by_name[name][0], shape=by_name[name][1], offset_bytes=offset, size_bytes=sizes[name])
        for name, offset in placed
    )
    return Bucket(index=index, size_bytes=slots[-1].offset_bytes + slots[-1].size_bytes, slots=slots)


def _aligned(offset: int, align: int) -> int:
    """The next multiple of ``align`` at or after ``offset``."""
    return -(-offset // align) * align
