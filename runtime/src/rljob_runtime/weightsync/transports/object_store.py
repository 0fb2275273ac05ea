"""Packed buckets through the cluster's object store: shared memory on one host, the network between hosts.

Per bucket: all trainer ranks gather, rank 0 packs, every engine takes; while engines take bucket i the trainer packs bucket i + 1. The
bucket travels from rank 0 to the engines as one object, and never through the driver. What fits one bucket is packed and loaded by one
call each, which all start at once.
"""

from __future__ import annotations

from rljob_runtime.cluster.protocol import Pending
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.delta import DeltaEncoder, Images
from rljob_runtime.weightsync.parcel import Parcel, sealed
from rljob_runtime.weightsync.transport import Shapes, SyncLink, TransportSettings, WeightSource


class ObjectStoreTransport:
    """The driver's part; see :class:`~rljob_runtime.weightsync.transport.Transport`."""

    warning: str | None = None

    def __init__(self, settings: TransportSettings) -> None:
        """Keep them."""
        self._settings = settings

    async def prepare(self, link: SyncLink) -> None:
        """Give trainer ranks the manifest, and engines an end that takes buckets as they come."""
        dense_above = self._settings.dense_above
        made = link.on_trainers("prepare_sender", f"{__name__}:{PackedSender.__name__}", link.manifest, {"dense_above": dense_above})
        receiver = {"sparse": dense_above is not None}
        ends = link.on_engines("prepare_receiver", f"{__name__}:{PackedReceiver.__name__}", receiver)
        await link.trainers_done(made)
        await link.engines_done(ends)

    async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Pack and take bucket after bucket, one ahead."""
        if len(link.manifest.buckets) == 1:
            packed = link.on_trainers("send_weights", version, 0)
            updating = link.update_whole(version, packed[0])
            await link.trainers_done(packed[1:])
            return await link.engines_done(updating, packed[0])
        loading: dict[int, Pending] = {}
        given: Pending | None = None
        begun = link.on_engines("begin_update", link.manifest, version)
        for bucket in link.manifest.buckets:
            packed = link.on_trainers("send_weights", version, bucket.index)
            await link.engines_done(begun)
            begun = {}
            await link.engines_done(loading, given)
            given = packed[0]
            loading = link.on_engines("load_bucket", bucket.index, given)
            if len(packed) > 1:
                await link.trainers_done(packed[1:])
        await link.engines_done(loading, given)
        return await link.engines_done(link.finish())


class PackedSender:
    """A trainer rank's end: a part is a bucket, whose bytes rank 0 returns."""

    def __init__(self, source: WeightSource, manifest: WeightManifest, *, dense_above: float | None) -> None:
        """Keep the rank and the layout; ``dense_above`` as in the settings."""
        self._source = source
        self._manifest = manifest
        self._delta = None if dense_above is None else DeltaEncoder(dense_above)

    def send(self, version: int, part: int) -> Parcel | None:
        """One bucket on rank 0, None elsewhere."""
        bucket = self._manifest.buckets[part]
        packed = self._source.pack_bucket(bucket)
        if packed is None:
            return None
        data, base = (packed, None) if self._delta is None else self._delta.encode(version, bucket, packed)
        return sealed(version, data, base=base)

    def close(self) -> None:
        """It holds nothing that others would need."""


class PackedReceiver:
    """An engine's end: buckets are kept until all are there."""

    def __init__(self, *, sparse: bool = False) -> None:
        """``sparse``: buckets may bring only what changed."""
        self._images = Images() if sparse else None

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        return UpdateAssembly(manifest, version, expected, images=self._images)
