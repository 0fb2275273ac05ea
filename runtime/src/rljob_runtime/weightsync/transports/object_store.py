"""Packed buckets through the cluster's object store: shared memory on one host, the network between hosts.

Per part (``shares``): all trainer ranks gather, each sender packs its bucket, every engine takes them; while engines take the buckets of
one part the trainer packs those of the next. A bucket travels from its sender to the engines as one object, once to each node, and never
through the driver. What fits one bucket is packed and loaded by one call each, which all start at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob_runtime.cluster.protocol import Pending
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.delta import Images
from rljob_runtime.weightsync.encoding import changes_of, host_encoder
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.parcel import Parcel, Remote, sealed
from rljob_runtime.weightsync.shares import shared_out
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
        settings = {"senders": self._settings.senders, "dense_above": dense_above}
        made = link.on_trainers("prepare_sender", f"{__name__}:{PackedSender.__name__}", link.manifest, settings)
        receiver = {"sparse": dense_above is not None}
        ends = link.on_engines("prepare_receiver", f"{__name__}:{PackedReceiver.__name__}", receiver)
        await link.trainers_done(made)
        await link.engines_done(ends)

    async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Pack and take part after part, one ahead."""
        if len(link.manifest.buckets) == 1:
            return await link.send_whole(version, self._settings.senders[0])
        loading: list[tuple[dict[int, Pending], Pending]] = []
        begun = link.on_engines("begin_update", link.manifest, version)
        for part, owned in enumerate(shared_out(link.manifest, self._settings.senders)):
            packed = link.on_trainers("send_weights", version, part)
            await link.engines_done(begun)
            begun = {}
            for calls, given in loading:
                await link.engines_done(calls, given)
            loading = [(link.on_engines("load_bucket", bucket.index, packed[rank]), packed[rank]) for rank, bucket in owned.items()]
            await link.others_done(packed, owned)
        for calls, given in loading:
            await link.engines_done(calls, given)
        return await link.engines_done(link.finish())


class PackedSender:
    """A trainer rank's end: a part is one bucket of every sender, whose bytes it returns."""

    def __init__(self, source: WeightSource, manifest: WeightManifest, *, senders: Sequence[int], dense_above: float | None) -> None:
        """Keep the rank and the layout; ``senders`` and ``dense_above`` as in the settings."""
        self._source = source
        self._parts = shared_out(manifest, senders)
        self._delta = host_encoder(dense_above)

    def send(self, version: int, part: int) -> Parcel | None:
        """Its bucket on a sender that has one, None elsewhere."""
        owned = self._parts[part]
        bucket = owned.get(self._source.rank)
        if bucket is None or self._delta is None:
            packed = self._source.pack_buckets(owned)
            return None if packed is None else sealed(version, packed)
        data, base = changes_of(self._source, owned, self._delta, version)
        return sealed(version, data, base=base)

    def close(self) -> None:
        """Let go of what was sent."""
        if self._delta is not None:
            self._delta.close()


class PackedReceiver:
    """An engine's end: buckets are kept until all are there."""

    tests: Sequence[Remote] = ()
    holdings: Holdings | None = None

    def __init__(self, *, sparse: bool = False) -> None:
        """``sparse``: buckets may bring only what changed."""
        self._images = Images() if sparse else None

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        return UpdateAssembly(manifest, version, expected, images=self._images)

    def close(self) -> None:
        """It holds nothing else."""
