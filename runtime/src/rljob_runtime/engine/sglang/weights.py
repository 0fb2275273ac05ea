"""One packed bucket in the form in which SGLang's server takes it: as it is, its bytes in shared memory."""

from __future__ import annotations

import base64
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.packing import ByteArray, as_byte_tensor


def shared(data: ByteArray) -> torch.Tensor:
    """The bytes in shared memory that has a name.

    Torch's default passes an open file, which an unrelated process cannot receive: it would end the server.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    copy = torch.empty(data.size, dtype=torch.uint8).share_memory_()
    copy.copy_(as_byte_tensor(data))
    return copy


def update_body(bucket: Bucket, data: torch.Tensor, ranks: int, weight_version: str | None) -> dict[str, Any]:
    """Body of ``/update_weights_from_tensor``; ``data`` has to live until the answer is there.

    Args:
        bucket: the layout.
        data: of :func:`shared`.
        ranks: of the server's tensor parallelism; each takes its part of the whole.
        weight_version: what is served from now on; None: the update is not whole yet.
    """
    metadata = [
        SimpleNamespace(
            name=slot.name,
            shape=slot.shape,
            dtype=getattr(torch, slot.dtype),
            start_idx=slot.offset_bytes,
            end_idx=slot.offset_bytes + slot.size_bytes,
            numel=slot.size_bytes,
        )
        for slot in bucket.slots
    ]
    payload = {"flattened_tensor": data, "metadata": metadata}
    return {
        # Each pickle holds one reference to the shared memory, which its reader takes over. With one pickle for all, the memory would be
        # gone once the second rank lets go.
        "serialized_named_tensors": [base64.b64encode(bytes(ForkingPickler.dumps(payload))).decode() for _ in range(ranks)],
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "weight_version": weight_version,
    }
