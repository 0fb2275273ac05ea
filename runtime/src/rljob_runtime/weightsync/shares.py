"""Which trainer rank sends which buckets of a manifest. Pure; the driver and every rank compute the same.

::

    senders (0, 2), buckets 0..4      part 0: {0: bucket 0, 2: bucket 1}   part 1: {0: bucket 2, 2: bucket 3}   part 2: {0: bucket 4}

All ranks gather the buckets of a part at once, each on its sender, and the senders pack them at the same time. Parts follow the order of
the manifest, so that an engine gets layers in about the order of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rljob_runtime.records import Bucket, WeightManifest


def shared_out(manifest: WeightManifest, senders: Sequence[int]) -> list[Mapping[int, Bucket]]:
    """By part: sender -> its bucket. Every bucket once; numbers of buckets per sender differ by at most one."""
    width = len(senders)
    return [dict(zip(senders, manifest.buckets[first : first + width], strict=False)) for first in range(0, len(manifest.buckets), width)]


def bucket_bytes(total_bytes: int, limit_bytes: int, num_senders: int) -> int:
    """Size of buckets with which every sender gets a part of the weights: the limit, or less where they would be too few."""
    return min(limit_bytes, max(MIN_SHARE_BYTES, -(-total_bytes // num_senders)))


MIN_SHARE_BYTES = 1 << 20
"""Buckets are not made smaller than this for the sake of more senders: a further call costs more than it saves."""
