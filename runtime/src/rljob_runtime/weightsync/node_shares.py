"""One copy of an update on a node: one engine of the node receives each bucket into shared memory, and the others read it there.

The memory has names that all engines of the node know beforehand, so that nothing but a bucket's description goes from one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.shared_memory import Segments, SharedBytes, forget, prefix_of
from rljob_runtime.weightsync.transport import TransportSettings

ByteArray = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShare:
    """What an engine has to know of its node's copy."""

    prefix: str
    """Of the names of the node's segments, for all groups of the run."""
    group: str
    """Of this group alone: no name is used twice."""
    sizes_bytes: tuple[int, ...]
    """By bucket; empty: the engine is the only one of its node, and receives into memory of its own."""
    leads: bool
    """Whether the engine receives; the others read."""

    @property
    def is_shared(self) -> bool:
        """Whether another engine of the node uses the same copy."""
        return bool(self.sizes_bytes)

    def segments(self) -> Segments:
        """Make the memory, and remove that of earlier groups of the node.

        Raises:
            WeightSyncError: the node has no shared memory, or not enough.
        """
        return Segments(self.prefix, {self._name(bucket): size for bucket, size in enumerate(self.sizes_bytes)})

    def shared(self, bucket: int, size_bytes: int) -> SharedBytes:
        """The first bytes of a bucket's memory."""
        return SharedBytes(segment=self._name(bucket), size_bytes=size_bytes)

    def _name(self, bucket: int) -> str:
        return f"{self.prefix}{self.group}-{bucket}"


class NodeCopy:
    """An engine's end of its node's copy."""

    def __init__(self, share: NodeShare) -> None:
        """Make the memory, if the engine leads; errors are those of :meth:`NodeShare.segments`."""
        self._share = share
        self._segments = share.segments() if share.leads else None

    @property
    def reads(self) -> bool:
        """Whether another engine has received what this one is to take."""
        return self._share.is_shared and not self._share.leads

    def place(self, bucket: int, size_bytes: int) -> ByteArray | None:
        """Where a bucket is to be received, shape (size_bytes,); None: in memory of the engine's own."""
        return self._segments.array(bucket, size_bytes) if self._segments is not None and self._share.is_shared else None

    def shared(self, bucket: int, size_bytes: int) -> SharedBytes:
        """See :meth:`NodeShare.shared`."""
        return self._share.shared(bucket, size_bytes)

    def close(self) -> None:
        """Remove the memory, if the engine leads, and let go of it."""
        if self._segments is not None:
            self._segments.close()
        forget(self._share.prefix)


def followers_of(engines: Sequence[int], settings: TransportSettings) -> dict[int, tuple[int, ...]]:
    """The first engine of each node, and the others of the node; each engine is a first one where nodes are not known."""
    by_node: dict[int, list[int]] = {}
    for engine in sorted(engines):
        by_node.setdefault(settings.engine_nodes[engine] if settings.engine_nodes else engine, []).append(engine)
    return {first: tuple(rest) for first, *rest in by_node.values()}


def shares_of(
    followers: dict[int, tuple[int, ...]], group: str, manifest: WeightManifest, settings: TransportSettings
) -> dict[int, NodeShare]:
    """By engine, of those whose node is known."""
    if not settings.engine_nodes:
        return {}
    every = tuple(bucket.size_bytes for bucket in manifest.buckets)
    return {
        engine: NodeShare(
            prefix=f"{prefix_of(settings.run)}node{settings.engine_nodes[engine]}-",
            group=group,
            sizes_bytes=every if rest else (),
            leads=engine == first,
        )
        for first, rest in followers.items()
        for engine in (first, *rest)
    }
