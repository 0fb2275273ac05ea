"""The trainer's half of a weight update: names, dtypes, shapes, and packed bytes of each bucket.

One flat gather per bucket to rank 0, not one per parameter. FSDP2 cuts every parameter along its first dimension into
``ceil(rows / ranks)`` rows per rank, so a full tensor is its ranks' pieces one after another and lands in the bucket as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, TensorSlot
from rljob_runtime.training.optimizer import local_tensor
from rljob_runtime.weightsync.packing import as_byte_tensor, pack

ByteArray = npt.NDArray[np.uint8]
WeightSpec = tuple[str, str, tuple[int, ...]]


def weight_specs(model: nn.Module, dtype: str) -> list[WeightSpec]:
    """(Hugging Face name, dtype, full shape) of each parameter, a tied head left out (the embedding carries it)."""
    return [(name, dtype, tuple(p.shape)) for name, p in model.named_parameters()]


def pack_bucket(parameters: Mapping[str, nn.Parameter], bucket: Bucket, out: ByteArray | None = None) -> ByteArray | None:
    """Gather the bucket's parameters on rank 0 and pack them; all ranks must call it with the same bucket.

    Args:
        parameters: all parameters by name, resharded.
        bucket: what goes where; values are cast to the slots' dtypes before they travel.
        out: where rank 0 packs, for example shared memory; None makes a fresh array.

    Returns:
        uint8, shape (bucket.size_bytes,) on rank 0; None on the others.

    Raises:
        WeightSyncError: the bucket names a parameter this model lacks, or of another shape.
    """
    for slot in bucket.slots:
        parameter = parameters.get(slot.name)
        if parameter is None or tuple(parameter.shape) != slot.shape:
            found = "missing" if parameter is None else f"of shape {tuple(parameter.shape)}"
            raise WeightSyncError(
                f"bucket {bucket.index}: {slot.name} {slot.shape} is {found} in the trainer; plan the manifest from its weight_specs"
            )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if out is None and rank == 0:
        out = np.zeros(bucket.size_bytes, dtype=np.uint8)  # zeros: the gaps between slots count in checksums
    shards = {slot.name: local_tensor(parameters[slot.name].detach()) for slot in bucket.slots}
    if world_size == 1:
        assert out is not None
        pack(bucket, shards, out)
        return out
    gathered = _gather([_as_bytes(shards[slot.name], slot.dtype) for slot in bucket.slots], bucket, rank, world_size)
    if gathered is None:
        return None
    assert out is not None
    _place(bucket, gathered, as_byte_tensor(out), world_size)
    return out


def shard_bytes(slot: TensorSlot, rank: int, world_size: int) -> int:
    """Bytes of the slot that ``rank`` holds."""
    rows = slot.shape[0]
    per_rank = -(-rows // world_size)
    held = max(0, min(per_rank, rows - rank * per_rank))
    return slot.size_bytes // rows * held if rows else 0


def _as_bytes(shard: torch.Tensor, dtype: str) -> torch.Tensor:
    """A shard in the slot's dtype as flat uint8; bytes travel because gloo does not know every dtype."""
    return shard.to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8)


def _gather(pieces: list[torch.Tensor], bucket: Bucket, rank: int, world_size: int) -> list[torch.Tensor] | None:
    """Each rank's pieces, one flat uint8 tensor per rank, on rank 0; None elsewhere. Padded to rank 0's, which holds most."""
    longest = sum(shard_bytes(slot, 0, world_size) for slot in bucket.slots)
    flat = torch.cat(pieces)
    sent = torch.zeros(longest, dtype=torch.uint8, device=flat.device)
    sent[: flat.numel()] = flat
    received = [torch.empty_like(sent) for _ in range(world_size)] if rank == 0 else None
    dist.gather(sent, received, dst=0)
    return None if received is None else [r.cpu() for r in received]


def _place(bucket: Bucket, gathered: list[torch.Tensor], out: torch.Tensor, world_size: int) -> None:
    """Copy each rank's rows of each parameter behind those of the rank before it."""
    for rank, data in enumerate(gathered):
        cursor = 0
        for slot in bucket.slots:
            size = shard_bytes(slot, rank, world_size)
            start = slot.offset_bytes + shard_bytes(slot, 0, world_size) * rank
            out[start : start + size] = data[cursor : cursor + size]
            cursor += size
