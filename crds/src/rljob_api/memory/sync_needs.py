"""What a weight sync takes of a trainer process, see ``rljob_runtime.training.weights``, and of a node."""

from __future__ import annotations

from rljob_api.dtypes import DTYPE_BYTES, sync_dtype
from rljob_api.memory.adapters import sent_parameters
from rljob_api.memory.model import Kind, Need
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.units import ceil_div, show_bytes, show_count
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec


def sync_buffers(bucket: int, shards: int, *, on_device: bool, senders: int, sends: bool) -> tuple[Need, ...]:
    """Buckets on their way; a larger tensor than a bucket travels alone.

    Args:
        bucket: bytes of the largest.
        shards: processes that share out each tensor.
        on_device: whether they do not go through host memory; then one travels, or is read, while the next is packed.
        senders: processes that send buckets of their own at the same time.
        sends: whether this one is among them.
    """
    whole = 2 if on_device else 1
    if shards == 1:
        size, count = whole * bucket, "2 buckets" if on_device else "1 bucket"
    else:  # own shards of every sender's bucket three times: cast, in one piece, padded; on a sender everybody's of its own as well
        size, count = 3 * senders * ceil_div(bucket, shards), f"{3 * senders} / {shards} buckets"
        if sends:
            size, count = size + (2 * whole - 1) * bucket, f"{2 * whole - 1} + {count}"
    formula, remedy = f"{count} of {show_bytes(bucket)}", "a smaller weightSync.bucketBytes"
    return (Need(kind=Kind.WORKSPACE, name="weight buckets", formula=formula, num_bytes=size, remedy=remedy),)


def largest_bucket(spec: RLJobSpec, shape: ModelShape) -> int:
    """Bytes of the largest bucket of a weight sync: bucketBytes, or the embedding where that is larger, at most all that travels."""
    number = DTYPE_BYTES[sync_dtype(spec)]
    embedding = 0 if shape.decoder is None else shape.decoder.embedding_parameters * number
    return min(sent_parameters(spec, shape) * number, max(spec.weight_sync.bucket_bytes, embedding))


def whole_update(spec: RLJobSpec, shape: ModelShape, backend: SyncBackend, engines: int) -> Need:
    """An update in the host memory of a node with so many engines.

    Ray's object store and shared memory hold it once for all processes of the node, until every engine has it; with TCP each engine
    receives a copy of its own.
    """
    number, parameters = DTYPE_BYTES[sync_dtype(spec)], sent_parameters(spec, shape)
    formula, size = f"{show_count(parameters)} x {number} B", parameters * number
    if backend is SyncBackend.TCP and engines > 1:
        name, formula = "weights that engines receive", f"{engines} engines x {formula}"
        return Need(kind=Kind.WORKSPACE, name=name, formula=formula, num_bytes=engines * size, remedy="weightSync.backend: ObjectStore")
    return Need(kind=Kind.WORKSPACE, name="weights in shared memory", formula=f"{formula}, once per node", num_bytes=size)
