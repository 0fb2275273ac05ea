"""Packed buckets in shared memory of the one node that has trainer rank 0, all other senders and all engines.

A sender packs into a segment of its own, and every engine process and each rank of its tensor parallelism reads it there: one copy per
node, of which nothing but the name travels. Where engines have nothing to do during a sync, two segments of each sender take turns: a
bucket is loaded into the models while the next one is packed, and compared with what was sent while it is loaded. Where they generate
meanwhile, each bucket has a segment of its own and is compared as it comes, so that they stop only to load. Where buckets may bring only
what changed, they are compared as they come as well, before the engine applies that to what it has.

On CUDA segments are page-locked in every process that copies from or to its device (``weightsync.staging``). A sender that looks for
changes locks its copy of the weights instead (``weightsync.staged_delta``).

What every sender packs first is a test: engines that read other bytes than it wrote (other nodes than planned, no shared memory, not enough
of it) get their weights through the object store, and the transport says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rljob_runtime.cluster.protocol import Pending
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.delta import Images
from rljob_runtime.weightsync.encoding import changes_of, host_encoder
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.packing import clear_gaps
from rljob_runtime.weightsync.parcel import Digest, Parcel, Remote, sealed
from rljob_runtime.weightsync.shared_memory import Segments, prefix_of
from rljob_runtime.weightsync.shares import shared_out
from rljob_runtime.weightsync.transport import Shapes, SyncLink, TransportSettings, WeightSource
from rljob_runtime.weightsync.transports.tested import TEST_PART, TEST_VERSION, TestedTransport

if TYPE_CHECKING:
    from rljob_runtime.weightsync.staging import Staging
    from rljob_runtime.weightsync.transport import ByteArray

TURNS = 2
"""Segments of a sender that take turns: one is packed while the other is loaded."""


class SharedMemoryTransport(TestedTransport):
    """The driver's part; see :class:`~rljob_runtime.weightsync.transport.Transport`."""

    title = "shared memory"
    together = False

    def __init__(self, settings: TransportSettings) -> None:
        """Segments carry the name of the run."""
        super().__init__(settings)
        self._prefix = prefix_of(settings.run)
        self._segments = TURNS

    async def _prepare(self, link: SyncLink) -> None:
        parts = len(shared_out(link.manifest, self._settings.senders))
        self._segments = parts if self._settings.while_generating else min(TURNS, parts)
        settings: Mapping[str, Any] = {
            "prefix": self._prefix,
            "senders": self._settings.senders,
            "segments": self._segments,
            "dense_above": self._settings.dense_above,
        }
        made = link.on_trainers("prepare_sender", f"{__name__}:{SharedSender.__name__}", link.manifest, settings)
        await link.trainers_done(made)
        packed = await link.trainers_done(link.on_trainers("send_weights", TEST_VERSION, TEST_PART))
        receiver = {
            "streams": self._segments < parts,
            "proves_late": not self._settings.while_generating,
            "tests": [parcel for parcel in packed if parcel is not None],
            "prefix": self._prefix,
            "sparse": self._settings.dense_above is not None,
        }
        await link.engines_done(link.on_engines("prepare_receiver", f"{__name__}:{SharedReceiver.__name__}", receiver))

    async def _transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Pack one bucket after the other; one whose place is needed has to be in all engines first."""
        if len(link.manifest.buckets) == 1:
            return await link.send_whole(version, self._settings.senders[0])
        begun = link.on_engines("begin_update", link.manifest, version)
        loading: list[list[tuple[dict[int, Pending], Pending]]] = []
        for part, owned in enumerate(shared_out(link.manifest, self._settings.senders)):
            if part >= self._segments:
                for calls, given in loading[part - self._segments]:
                    await link.engines_done(calls, given)
            packed = link.on_trainers("send_weights", version, part)
            await link.engines_done(begun)
            begun = {}
            loading.append([(link.on_engines("load_bucket", bucket.index, packed[rank]), packed[rank]) for rank, bucket in owned.items()])
            await link.others_done(packed, owned)
        for calls, given in itertools.chain(*loading[-self._segments :]):
            await link.engines_done(calls, given)
        return await link.engines_done(link.finish())


class SharedSender:
    """A trainer rank's end: a part is one bucket of every sender, which it packs into one of its segments."""

    def __init__(
        self,
        source: WeightSource,
        manifest: WeightManifest,
        *,
        prefix: str,
        senders: Sequence[int],
        segments: int,
        dense_above: float | None,
    ) -> None:
        """Make the segments of a sender; other ranks have none.

        Raises:
            WeightSyncError: the node has no shared memory, or not enough.
        """
        self._source = source
        self._parts = shared_out(manifest, senders)
        own = [part[source.rank].size_bytes for part in self._parts if source.rank in part]
        self._segments = Segments.equal(f"{prefix}{source.rank}-", min(segments, len(own)), max(own)) if own else None
        self._delta = host_encoder(dense_above)
        self._staging = self._staged(dense_above)

    def _staged(self, dense_above: float | None) -> Staging | None:
        """What copies from this rank's device into the segments; what looks for changes copies by itself."""
        if self._segments is None or dense_above is not None:
            return None
        from rljob_runtime.weightsync.group import device_here
        from rljob_runtime.weightsync.staging import staging_for

        staging = staging_for(device_here())
        if staging is not None:
            for index in range(len(self._segments)):
                staging.add(*self._segments.whole(index))
        return staging

    def send(self, version: int, part: int) -> Parcel | None:
        """Where its bucket lies, on a sender that has one; None elsewhere."""
        owned = self._parts[part]
        bucket = owned.get(self._source.rank)
        if bucket is None or self._segments is None:
            self._source.pack_buckets(owned)
            return None
        index = part % len(self._segments)
        if self._delta is None or version == TEST_VERSION:
            checksum = self._pack(owned, bucket, self._segments.array(index, bucket.size_bytes))
            return Parcel(version=version, checksum=checksum, payload=self._segments.shared(index, bucket.size_bytes))
        data, base = changes_of(self._source, owned, self._delta, version, partial(self._segments.array, index))
        return sealed(version, data, self._segments.shared(index, data.size), base=base)

    def _pack(self, owned: Mapping[int, Bucket], bucket: Bucket, data: ByteArray) -> int:
        """Pack into a segment, by way of the device where weights are on one; the checksum."""
        room = None if self._staging is None else self._staging.room(bucket.size_bytes)
        if self._staging is not None and room is not None:
            self._source.pack_buckets(owned, room)
            return self._staging.off(room, data)
        clear_gaps(bucket, data)
        digest = Digest(data)
        self._source.pack_buckets(owned, data, digest.advance)
        return digest.finished()

    def close(self) -> None:
        """Remove the segments, and let go of what was sent."""
        if self._delta is not None:
            self._delta.close()
        if self._staging is not None:
            self._staging.close()
        if self._segments is not None:
            self._segments.close()


class SharedReceiver:
    """An engine's end."""

    tests: Sequence[Remote] = ()

    def __init__(
        self, *, streams: bool, tests: Sequence[Parcel], prefix: str | None = None, proves_late: bool = False, sparse: bool = False
    ) -> None:
        """Read the first bucket of every sender.

        Args:
            prefix: of the names of all senders' segments.
            streams: see ``transport.IncomingUpdate``.
            tests: the first bucket of every sender.
            proves_late: see :class:`~rljob_runtime.weightsync.assembly.UpdateAssembly`.
            sparse: later buckets may bring only what changed.

        Raises:
            WeightSyncError: it cannot be read here, or is not what the sender wrote.
        """
        for test in tests:
            test.check("the first bucket of a sender")
        self.holdings = None if prefix is None else Holdings(segments=prefix)
        self._streams = streams
        self._proves_late = proves_late
        self._images = Images() if sparse else None

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        return UpdateAssembly(manifest, version, expected, streams=self._streams, proves_late=self._proves_late, images=self._images)

    def close(self) -> None:
        """Let go of the senders' segments."""
        if self.holdings is not None:
            self.holdings.free()
