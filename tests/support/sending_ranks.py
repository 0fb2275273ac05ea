"""A trainer rank of this process that packs and sends what a test makes up."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np

from rljob_runtime.records import Bucket
from rljob_runtime.weightsync import sending
from rljob_runtime.weightsync.transport import ByteArray


class SendingRank(sending.SendingRank):
    """Packs into host memory; a subclass knows the numbers."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

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
