"""What a weight sync takes of a trainer process, see ``rljob_runtime.training.weights``, and of a node."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.dtypes import DTYPE_BYTES, sync_dtype
from rljob_api.memory.adapters import sent_parameters
from rljob_api.memory.model import Kind, Need
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.units import ceil_div, show_bytes, show_count
from rljob_api.v1alpha1.operations import THROUGH_HOST_MEMORY, SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncNeeds:
    """Of one process of the trainer."""

    spec: RLJobSpec
    shape: ModelShape
    backend: SyncBackend
    shards: int
    """Processes that share out each tensor."""
    senders: int
    """Processes that send buckets of their own at the same time."""
    first: bool
    """Whether it is rank 0."""
    on_cuda: bool

    def kept(self) -> tuple[Need, ...]:
        """In its own memory from the first sync on: what it sent last (``rljob_runtime.weightsync.device_delta``)."""
        return self._sent() if self._on_device or not self.on_cuda else ()

    def kept_on_host(self) -> tuple[Need, ...]:
        """The same beside a device whose weights go through host memory (``rljob_runtime.weightsync.staged_delta``)."""
        return () if self._on_device or not self.on_cuda else self._sent()

    def _sent(self) -> tuple[Need, ...]:
        if not self._encodes:
            return ()
        parameters, number, parts = sent_parameters(self.spec, self.shape), DTYPE_BYTES[sync_dtype(self.spec)], self._parts
        formula = f"{show_count(parameters)} x {number} B{'' if parts == 1 else f' / {parts}'}"
        size = ceil_div(parameters * number, parts)
        return (Need(kind=Kind.PROCESS, name="weights as last sent", formula=formula, num_bytes=size, remedy="no weightSync.delta"),)

    def buffers(self) -> tuple[Need, ...]:
        """Buckets on their way; a larger tensor travels alone. Between devices one travels, or is read, while the next is packed."""
        bucket, whole = largest_bucket(self.spec, self.shape), 2 if self._on_device else 1
        if self.shards == 1:
            size, count = whole * bucket, "2 buckets" if self._on_device else "1 bucket"
        else:  # own shards of every sender's bucket three times: cast, in one piece, padded; on a sender everybody's of its own as well
            size, count = 3 * self._parts * ceil_div(bucket, self.shards), f"{3 * self._parts} / {self.shards} buckets"
            if self._sends:
                size, count = size + (2 * whole - 1) * bucket, f"{2 * whole - 1} + {count}"
        if self._compares:
            # Beside the bucket that is compared, its changes are collected and put together; with NCCL earlier ones wait, and through host
            # memory what was sent last comes back.
            extra = 2 if self.backend is SyncBackend.IPC else 3
            size, count = size + extra * bucket, f"{extra} + {count}"
        formula, remedy = f"{count} of {show_bytes(bucket)}", "a smaller weightSync.bucketBytes"
        return (Need(kind=Kind.WORKSPACE, name="weight buckets", formula=formula, num_bytes=size, remedy=remedy),)

    @property
    def _on_device(self) -> bool:
        """Whether buckets do not go through host memory."""
        return self.backend not in THROUGH_HOST_MEMORY

    @property
    def _parts(self) -> int:
        """Processes that share all buckets out among them; with IPC all pack the same."""
        return 1 if self.backend is SyncBackend.IPC else self.senders

    @property
    def _sends(self) -> bool:
        return self.first or self.senders > 1 or self.backend is SyncBackend.IPC

    @property
    def _encodes(self) -> bool:
        """Whether it finds what changed."""
        return self.spec.weight_sync.delta is not None and self._sends

    @property
    def _compares(self) -> bool:
        """Whether it does so in buffers of its own: on CPU pieces of a bucket are compared where they are."""
        return self._encodes and (self._on_device or self.on_cuda)


def largest_bucket(spec: RLJobSpec, shape: ModelShape) -> int:
    """Bytes of the largest bucket of a weight sync: bucketBytes, or the embedding where that is larger, at most all that travels."""
    number = DTYPE_BYTES[sync_dtype(spec)]
    embedding = 0 if shape.decoder is None else shape.decoder.embedding_parameters * number
    return min(sent_parameters(spec, shape) * number, max(spec.weight_sync.bucket_bytes, embedding))


def whole_update(spec: RLJobSpec, shape: ModelShape) -> Need:
    """An update in the host memory of a node: the object store and shared memory hold it once for all engines, until every one has it."""
    number, parameters = DTYPE_BYTES[sync_dtype(spec)], sent_parameters(spec, shape)
    formula, size = f"{show_count(parameters)} x {number} B", parameters * number
    return Need(kind=Kind.WORKSPACE, name="weights in shared memory", formula=f"{formula}, once per node", num_bytes=size)


def keeps_update(backend: SyncBackend, engines: int) -> bool:
    """Whether that memory stays between two syncs on a node with so many engines (``rljob_runtime.weightsync.node_shares``)."""
    return backend is SyncBackend.TCP and engines > 1
