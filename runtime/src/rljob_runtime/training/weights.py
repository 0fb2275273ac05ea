"""The trainer's half of a weight update: names, dtypes, shapes, and packed bytes of each bucket.

One flat gather per bucket to the rank that sends it, not one per parameter; several at the same time to several ranks, and one for all
where every rank gets the same bucket, as engines on all devices of the trainer read it (IPC). Tensor parallelism
divides a parameter by rows or columns into equal parts, and FSDP2 cuts each part along its first dimension into ``ceil(rows / fsdp ranks)``
rows per rank: each rank has one block of the full tensor, whose bytes land in the bucket. Layers with adapters go out merged, so that
engines see an ordinary model, or the adapters alone. Experts travel as the matrices that a checkpoint has of them
(:mod:`rljob_runtime.weightsync.checkpoint_names`); FSDP2 and expert parallelism cut between experts, so that one rank has each of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, TensorSlot
from rljob_runtime.training.lora import ADAPTER_NAMES, LoraLinear, merged_weight
from rljob_runtime.training.parallel import Layout, divided_dimension, layout_of, local_tensor
from rljob_runtime.weightsync.adapters import LORA_A, LORA_B
from rljob_runtime.weightsync.checkpoint_names import NamedPart, is_router_bias
from rljob_runtime.weightsync.packing import as_byte_tensor, pack

ByteArray = npt.NDArray[np.uint8]
WeightSpec = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What one rank has of a slot: rows of the full tensor, and of each row a range of bytes."""

    first_row: int
    rows: int
    first_byte: int
    row_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size of the whole block."""
        return self.rows * self.row_bytes


def weight_specs(model: nn.Module, dtype: str) -> list[WeightSpec]:
    """(Hugging Face name, dtype, full shape) of each parameter of the plain model, a tied head left out (the embedding carries it).

    Router biases travel in float32: bfloat16 would round away what an update changes.
    """
    return [(name, "float32" if is_router_bias(name) else dtype, part.shape) for name, part in parts_of(model).items()]


def adapter_specs(model: nn.Module, dtype: str) -> list[WeightSpec]:
    """The same of the adapters, by the names of :mod:`rljob_runtime.weightsync.adapters`."""
    return [(name, dtype, tuple(p.shape)) for name, p in _adapters(model)]


def parts_of(model: nn.Module) -> Mapping[str, NamedPart]:
    """Checkpoint name -> part, which the loaded model carries (:func:`~rljob_runtime.training.model.load_model`)."""
    parts: Mapping[str, NamedPart] = model.checkpoint_parts  # type: ignore[assignment]
    return parts


def pack_buckets(
    model: nn.Module,
    buckets: Mapping[int, Bucket],
    out: ByteArray | torch.Tensor | None = None,
    on_packed: Callable[[int], None] | None = None,
) -> ByteArray | torch.Tensor | None:
    """Gather buckets at the same time, each on its ranks, which pack it; all ranks must call it with the same buckets.

    Args:
        model: sharded, and resharded after its last forward.
        buckets: by rank; what goes where. Values are cast to the slots' dtypes before they travel.
        out: where this rank packs, for example shared memory, or a uint8 tensor on its device; None makes a fresh array.
        on_packed: see :func:`~rljob_runtime.weightsync.packing.pack`; several ranks, whose blocks come in another order, do not call it.

    Returns:
        ``out``, uint8, shape (size_bytes of its bucket,) on a rank that has one; None on the others.

    Raises:
        WeightSyncError: a bucket names a parameter this model lacks, or of another shape.
    """
    sources = _sources(model, buckets.values())
    own = buckets.get(dist.get_rank())
    if out is None and own is not None:
        out = np.zeros(own.size_bytes, dtype=np.uint8)  # zeros: the gaps between slots count in checksums
    layout = layout_of(model) if dist.get_world_size() > 1 else None
    begun: dict[int, _Gathered] = {}
    for bucket, ranks in _destinations(buckets):
        shards = {slot.name: _shard(model, slot.name, sources[slot.name]) for slot in bucket.slots}
        if layout is None:
            assert out is not None
            pack(bucket, shards, out, on_packed)
            return out
        begun |= _begin_gathers(bucket, shards, sources, layout, ranks)
    for one in begun.values():
        one.work.wait()
    gathered = begun.get(dist.get_rank())
    if own is None:
        return None
    assert out is not None
    assert gathered is not None
    target = as_byte_tensor(out) if isinstance(out, np.ndarray) else out
    for blocks, data in zip(gathered.held, gathered.received or (), strict=True):
        _place(own, blocks, data, target)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Where a slot's numbers are."""

    tensor: torch.Tensor
    """A parameter, sharded; or a buffer, of which every rank has all."""
    part: NamedPart

    @property
    def is_whole(self) -> bool:
        """Whether it is a buffer."""
        return not isinstance(self.tensor, nn.Parameter)


def _sources(model: nn.Module, buckets: Iterable[Bucket]) -> dict[str, _Source]:
    """Of every slot, by its name.

    Raises:
        WeightSyncError: a bucket names what this model lacks, or of another shape.
    """
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parts, adapters = parts_of(model), dict(_adapters(model))
    found = {}
    for bucket in buckets:
        for slot in bucket.slots:
            part, adapter = parts.get(slot.name), adapters.get(slot.name)
            if part is None and adapter is not None:
                part = NamedPart(parameter=slot.name, shape=tuple(adapter.shape))
            if part is None or part.shape != slot.shape:
                have = "missing" if part is None else f"of shape {part.shape}"
                raise WeightSyncError(
                    f"bucket {bucket.index}: {slot.name} {slot.shape} is {have} in the trainer; plan the manifest from its specs"
                )
            found[slot.name] = _Source(tensor=tensors[part.parameter] if adapter is None else adapter, part=part)
    return found


def block_of(slot: TensorSlot, divided: int | None, layout: Layout, fsdp_rank: int, tp_rank: int) -> Block:
    """What a rank sends of a slot: what it has, or nothing where the first tp rank has the same.

    Args:
        slot: its full shape and size.
        divided: dimension that tp divides, 0 or 1; None if each tp rank has all of it.
        layout: numbers of ranks.
        fsdp_rank: of the rank.
        tp_rank: of the rank.
    """
    rows = slot.shape[0]
    row_bytes = slot.size_bytes // rows if rows else 0
    first_row, first_byte = 0, 0
    if divided == 0:
        rows //= layout.tp_size
        first_row = rows * tp_rank
    elif divided == 1:
        row_bytes //= layout.tp_size
        first_byte = row_bytes * tp_rank
    per_rank = -(-rows // layout.fsdp_size)
    held = max(0, min(per_rank, rows - fsdp_rank * per_rank))
    if divided is None and tp_rank > 0:
        held = 0
    return Block(first_row=first_row + fsdp_rank * per_rank if held else 0, rows=held, first_byte=first_byte, row_bytes=row_bytes)


def _adapters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that are trained, by the names they travel under."""
    ends = dict(zip(ADAPTER_NAMES, (LORA_A, LORA_B), strict=True))
    for name, parameter in model.named_parameters():
        layer, _, last = name.rpartition(".")
        if last in ends:
            yield layer + ends[last], parameter


def _shard(model: nn.Module, name: str, source: _Source) -> torch.Tensor:
    """This rank's block of a weight, merged where it has adapters (a collective then); or of an adapter, with the scale in ``B``.

    An expert's matrix is returned whole, or not at all.
    """
    with torch.no_grad():  # the shard itself: through autograd, or a DTensor's detach, this would take longer than the copy of a small one
        shard = local_tensor(source.tensor).detach()
    part = source.part
    if part.expert is not None:
        layout = layout_of(model)
        holder, local = layout.place_of_expert(part.expert, source.tensor.shape[0])
        if holder != dist.get_rank():
            return shard.new_empty(0)
        return shard[local, part.first_row : part.first_row + part.shape[0]]
    if name.endswith(LORA_A):
        return shard
    if name.endswith(LORA_B):
        adapted = model.get_submodule(name.removesuffix(LORA_B))
        assert isinstance(adapted, LoraLinear)
        return shard * adapted.scale
    owner, _, kind = part.parameter.rpartition(".")
    if kind != "weight" or not isinstance(module := model.get_submodule(owner), LoraLinear):
        return shard
    # rows of the product need the same rows of B, and all rows of A
    return merged_weight(shard, _gathered_over_fsdp(module.lora_a.detach()), local_tensor(module.lora_b.detach()), module.scale)


def _gathered_over_fsdp(tensor: torch.Tensor) -> torch.Tensor:
    """This tp rank's part of a tensor, from all ranks that FSDP shards it over."""
    assert isinstance(tensor, DTensor)
    return local_tensor(tensor.redistribute(placements=[Replicate(), *tensor.placements[1:]]))


def _as_bytes(shard: torch.Tensor, dtype: str) -> torch.Tensor:
    """A shard in the slot's dtype as flat uint8; bytes travel because gloo does not know every dtype."""
    return shard.to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathered:
    """A gather under way."""

    held: list[list[Block]]
    """By rank: what it has of each slot."""
    sent: torch.Tensor
    """Kept until it has traveled."""
    received: list[torch.Tensor] | None
    """By rank, flat uint8, once ``work`` is done; None on ranks that get nothing."""
    work: dist.Work


def _destinations(buckets: Mapping[int, Bucket]) -> list[tuple[Bucket, list[int]]]:
    """Every bucket once, with the ranks that get it."""
    found: dict[int, tuple[Bucket, list[int]]] = {}
    for rank, bucket in buckets.items():
        found.setdefault(bucket.index, (bucket, []))[1].append(rank)
    return list(found.values())


def _begin_gathers(
    bucket: Bucket, shards: Mapping[str, torch.Tensor], sources: Mapping[str, _Source], layout: Layout, destinations: Sequence[int]
) -> dict[int, _Gathered]:
    """Send this rank's blocks of a bucket to some ranks; all travel as the longest of any rank. Gathers by the rank that gets it.

    One all-gather where all ranks get it: a gather to each of them one after the other would take as many times as long as there are ranks.
    """
    held = [
        [_held(slot, sources[slot.name], layout, fsdp_rank, tp_rank) for slot in bucket.slots]
        for fsdp_rank in range(layout.fsdp_size)
        for tp_rank in range(layout.tp_size)
    ]
    mine = held[dist.get_rank()]
    flat = torch.cat([_as_bytes(shards[slot.name], slot.dtype)[: b.size_bytes] for slot, b in zip(bucket.slots, mine, strict=True)])
    sent = torch.zeros(max(sum(block.size_bytes for block in blocks) for blocks in held), dtype=torch.uint8, device=flat.device)
    sent[: flat.numel()] = flat
    if len(destinations) == len(held):
        gathered = sent.new_empty(len(held), sent.numel())
        work = dist.all_gather_into_tensor(gathered.view(-1), sent, async_op=True)
        assert work is not None
        return {dist.get_rank(): _Gathered(held=held, sent=sent, received=list(gathered.unbind()), work=work)}
    begun = {}
    for destination in destinations:
        received = [torch.empty_like(sent) for _ in held] if dist.get_rank() == destination else None
        work = dist.gather(sent, received, dst=destination, async_op=True)
        assert work is not None
        begun[destination] = _Gathered(held=held, sent=sent, received=received, work=work)
    return begun


def _held(slot: TensorSlot, source: _Source, layout: Layout, fsdp_rank: int, tp_rank: int) -> Block:
    """What a rank sends of a slot; an expert's matrix comes whole from the one that has the expert, a buffer from the first."""
    holder = 0
    if source.part.expert is not None:
        holder, _ = layout.place_of_expert(source.part.expert, source.tensor.shape[0])
    elif not source.is_whole:
        return block_of(slot, divided_dimension(source.tensor), layout, fsdp_rank, tp_rank)
    rows = slot.shape[0] if fsdp_rank * layout.tp_size + tp_rank == holder else 0
    return Block(first_row=0, rows=rows, first_byte=0, row_bytes=slot.size_bytes // slot.shape[0])


def _place(bucket: Bucket, blocks: list[Block], data: torch.Tensor, out: torch.Tensor) -> None:
    """Copy one rank's blocks to their places in the bucket, also from a device to the host: fresh host memory would cost more."""
    cursor = 0
    for slot, block in zip(bucket.slots, blocks, strict=True):
        if block.size_bytes == 0:
            continue
        whole = out[slot.offset_bytes : slot.offset_bytes + slot.size_bytes].view(slot.shape[0], -1)
        target = whole[block.first_row : block.first_row + block.rows, block.first_byte : block.first_byte + block.row_bytes]
        target.copy_(data[cursor : cursor + block.size_bytes].view(block.rows, block.row_bytes))
        cursor += block.size_bytes
