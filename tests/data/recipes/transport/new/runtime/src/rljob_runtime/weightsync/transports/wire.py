"""The transport of the recipe, all three ends. Like a collective, it transfers while the engine is paused."""

from __future__ import annotations

import queue
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from rljob_runtime.errors import DeadlineError, WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.assembly import verify_manifest
from rljob_runtime.weightsync.transport import ByteArray, Shapes, SyncLink, TransportSettings, WeightSource

WIRES: Mapping[str, queue.Queue[ByteArray]] = defaultdict(queue.Queue)
"""One for each engine: stands for a network."""


class WireTransport:
    """The driver's end."""

    warning: str | None = None

    def __init__(self, settings: TransportSettings) -> None:
        """All it needs comes with the link."""

    async def prepare(self, link: SyncLink) -> None:
        """Make both other ends."""
        wires = {index: f"wire-{index}" for index in link.engines}
        made = link.on_trainers("prepare_sender", f"{__name__}:WireSender", link.manifest, {"wires": list(wires.values())})
        ends = {i: engine.start("prepare_receiver", f"{__name__}:WireReceiver", {"wire": wires[i]}) for i, engine in link.engines.items()}
        await link.trainers_done(made)
        await link.engines_done(ends)

    async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Send one version to all engines."""
        await link.engines_done(link.on_engines("begin_update", link.manifest, version))
        finishing = link.finish()  # before the sender: both sides of a collective have to be there
        sent = link.on_trainers("send_weights", version, 0)
        served = await link.engines_done(finishing)
        await link.trainers_done(sent)
        return served


class WireSender:
    """A trainer rank's end."""

    def __init__(self, source: WeightSource, manifest: WeightManifest, wires: list[str]) -> None:
        self._source, self._manifest, self._wires = source, manifest, wires

    def send(self, version: int, part: int) -> None:
        """Put every bucket on all wires."""
        for bucket in self._manifest.buckets:
            data = self._source.pack_buckets({0: bucket})
            if data is not None:
                for wire in self._wires:
                    WIRES[wire].put(data)

    def close(self) -> None:
        """It holds nothing."""


class WireReceiver:
    """An engine's end."""

    tests = ()
    holdings = None

    def __init__(self, wire: str) -> None:
        self._wire = wire

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> WireUpdate:
        """Check the layout, and expect one version."""
        if expected is not None:
            verify_manifest(manifest, expected)
        return WireUpdate(self._wire, manifest, version)

    def close(self) -> None:
        """It holds nothing."""


class WireUpdate:
    """One version on its way in."""

    streams = False
    received_bytes = 0

    def __init__(self, wire: str, manifest: WeightManifest, version: int) -> None:
        self.manifest, self.version, self._wire = manifest, version, wire

    def take(self, part: int, data: Any) -> None:
        """Refuse parts."""
        raise WeightSyncError("nothing comes in parts over a wire")

    def check(self) -> None:
        """Everything comes later."""

    def receive(self, deadline: float) -> Iterator[tuple[Bucket, ByteArray]]:
        """Take every bucket from the wire."""
        for bucket in self.manifest.buckets:
            try:
                data = WIRES[self._wire].get(timeout=max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                raise DeadlineError(f"bucket {bucket.index} did not come over {self._wire}") from None
            self.received_bytes += data.size
            yield bucket, data
