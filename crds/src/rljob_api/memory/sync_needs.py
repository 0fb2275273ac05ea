"""What a weight sync takes of a trainer process, see ``rljob_runtime.training.weights``."""

from __future__ import annotations

from rljob_api.dtypes import DTYPE_BYTES, sync_dtype
from rljob_api.memory.adapters import sent_parameters
from rljob_api.memory.model import Kind, Need
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.units import ceil_div, show_bytes, show_count
from rljob_api.v1alpha1.rljob import RLJobSpec


def sync_buffers(bucket: int, shards: int, *, on_device: bool, senders: int, sends: bool, compares: bool) -> tuple[Need, ...]:
    """Buckets on their way; a larger tensor than a bucket travels alone.

    Args:
        bucket: bytes of the largest.
        shards: processes that share out each tensor.
        on_device: whether they do not go through host memory; then one travels, or is read, while the next is packed.
        senders: processes that send buckets of their own at the same time.
        sends: whether this one is among them.
        compares: whether it finds what changed, on its device: beside the bucket that it compares, changes are collected and put together.
    """
    whole = 2 if on_device else 1
    if shards == 1:
        size, count = whole * bucket, "2 buckets" if on_device else "1 bucket"
    else:  # own shards of every sender's bucket three times: cast, in one piece, padded; on a sender everybody's of its own as well
        size, count = 3 * senders * ceil_div(bucket, shards), f"{3 * senders} / {shards} buckets"
        if sends:
            size, count = size + (2 * whole - 1) * bucket, f"{2 * whole - 1} + {count}"
    if compares and on_device and sends:
        size, count = size + 2 * bucket, f"2 + {count}"
    formula, remedy = f"{count} of {show_bytes(bucket)}", "a smaller weightSync.bucketBytes"
    return (Need(kind=Kind.WORKSPACE, name="weight buckets", formula=formula, num_bytes=size, remedy=remedy),)


def sent_weights(spec: RLJobSpec, shape: ModelShape, senders: int) -> Need:
    """What a sender keeps on its device of the weights that it sent last, to send only what changed (``weightsync.device_delta``)."""
    parameters, number = sent_parameters(spec, shape), DTYPE_BYTES[sync_dtype(spec)]
    return Need(
        kind=Kind.PROCESS,
        name="weights as last sent",
        formula=f"{show_count(parameters)} x {number} B{'' if senders == 1 else f' / {senders}'}",
        num_bytes=ceil_div(parameters * number, senders),
        remedy="no weightSync.delta",
    )


def largest_bucket(spec: RLJobSpec, shape: ModelShape) -> int:
    """Bytes of the largest bucket of a weight sync: bucketBytes, or the embedding where that is larger, at most all that travels."""
    number = DTYPE_BYTES[sync_dtype(spec)]
    embedding = 0 if shape.decoder is None else shape.decoder.embedding_parameters * number
    return min(sent_parameters(spec, shape) * number, max(spec.weight_sync.bucket_bytes, embedding))
