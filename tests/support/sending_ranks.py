"""A trainer rank of this process that packs and sends what a test makes up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.transport import ByteArray, make_end


class SendingRank(ABC):
    """Makes the sender that a transport asks for; a subclass knows the numbers."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._sender: Any = None

    @abstractmethod
    def fill(self, bucket: Bucket, out: ByteArray) -> None:
        """Write present numbers into the slots of a bucket."""

    def packed(self, bucket: Bucket) -> ByteArray:
        """A bucket as it is now."""
        out = np.zeros(bucket.size_bytes, dtype=np.uint8)
        self.fill(bucket, out)
        return out

    def pack_buckets(self, buckets: Mapping[int, Bucket], out: ByteArray | None = None, on_packed: Any = None) -> ByteArray | None:
        bucket = buckets.get(self.rank)
        if bucket is None:
            return None
        out = np.zeros(bucket.size_bytes, dtype=np.uint8) if out is None else out
        self.fill(bucket, out)
        return out

    def prepare_sender(self, sender: str, manifest: Any, settings: Any) -> None:
        self.close_sender()
        self._sender = make_end(sender, self, manifest, **settings)

    def close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def send_weights(self, version: int, part: int) -> Any:
        return self._sender.send(version, part)
