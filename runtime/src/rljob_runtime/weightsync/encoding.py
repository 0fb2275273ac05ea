"""A trainer rank packs its bucket, and finds what changed in it: the same for all transports, with an error where there is no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket

if TYPE_CHECKING:
    from rljob_runtime.weightsync.delta import BaseDeltaEncoder, SentT
    from rljob_runtime.weightsync.transport import ByteArray, WeightSource

ResultT = TypeVar("ResultT")


def host_encoder(dense_above: float | None) -> BaseDeltaEncoder[Any, ByteArray] | None:
    """What finds changes that travel through host memory; None: buckets are always whole."""
    if dense_above is None:
        return None
    from rljob_runtime.weightsync.staged_delta import encoder_here  # torch, which the driver does without

    return encoder_here(dense_above)


def room_for(source: WeightSource, owned: Mapping[int, Bucket], make: Callable[[], ResultT]) -> ResultT:
    """Memory into which a rank packs its bucket; where there is none, the rank takes part in the gather all the same.

    Args:
        source: the rank.
        owned: buckets of the gather, by rank.
        make: allocates the memory.

    Raises:
        WeightSyncError: there is none; no other rank waits for this one.
    """
    try:
        return make()
    except RuntimeError as error:  # torch's OutOfMemoryError is one
        source.pack_buckets(owned)
        raise _no_room(source, owned[source.rank], error) from error


def pack_into(source: WeightSource, owned: Mapping[int, Bucket], room: Any) -> None:
    """Take part in a gather, and pack the rank's bucket into an array, or a tensor on any device."""
    source.pack_buckets(owned, room if getattr(room, "is_cuda", True) else room.numpy())


def changes_of(
    source: WeightSource,
    owned: Mapping[int, Bucket],
    delta: BaseDeltaEncoder[Any, SentT],
    version: int,
    place: Callable[[int], SentT] | None = None,
) -> tuple[SentT, int | None]:
    """Pack the rank's bucket, and return what has to travel of it; see ``BaseDeltaEncoder.encode``.

    Raises:
        WeightSyncError: there is no memory; no other rank waits for this one.
    """
    import torch  # which the driver does without

    bucket = owned[source.rank]
    room = room_for(source, owned, lambda: delta.room(bucket))
    pack_into(source, owned, room)
    try:
        return delta.encode(version, bucket, room, place)
    except torch.OutOfMemoryError as error:
        raise _no_room(source, bucket, error) from error


def _no_room(source: WeightSource, bucket: Bucket, error: Exception) -> WeightSyncError:
    return WeightSyncError(
        f"trainer rank {source.rank} has no room for a bucket of {bucket.size_bytes} bytes: {error}; "
        "lower weightSync.bucketBytes, or training.microBatchTokens and engine.memoryFraction where they share the device"
    )
