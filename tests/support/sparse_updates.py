"""Updates of a real engine of which only the numbers that changed travel, and whole ones beside them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from rljob_runtime.engine.protocol import Engine
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.copies import COPIES
from rljob_runtime.weightsync.delta import BaseDeltaEncoder, DeltaEncoder, Images
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.packing import ByteArray, as_byte_tensor, pack
from rljob_runtime.weightsync.parcel import Parcel, Remote, fingerprint, sealed
from rljob_runtime.weightsync.transport import Shapes
from rljob_runtime.weightsync.transports.object_store import PackedReceiver
from tests.support.engine_contract import TIMEOUT_S, manifest_of, packed

PACKED_RECEIVER = "rljob_runtime.weightsync.transports.object_store:PackedReceiver"
BUCKET_BYTES = 50_000
"""Small, so that a bucket has one tensor or a few: some change as a whole, and some do not."""


class WatchedReceiver(PackedReceiver):
    """Shows the update that it began last, in the test's own process."""

    begun: ClassVar[list[UpdateAssembly]] = []

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """As an engine's end does."""
        self.begun[:] = [super().begin(manifest, version, expected)]
        return self.begun[0]


class Updates(ABC):
    """Updates of which only the numbers that changed travel; the first ones are whole."""

    def __init__(self, engine: Engine, encoder: BaseDeltaEncoder[Any, Any]) -> None:
        self._engine = engine
        self._encoder = encoder

    def push(self, tensors: Mapping[str, torch.Tensor], version: int) -> list[bool]:
        """Which buckets were sparse."""
        manifest, sparse = manifest_of(dict(tensors), BUCKET_BYTES), []
        self._engine.begin_update(manifest, version)
        for bucket in manifest.buckets:
            room = self._encoder.room(bucket)
            pack(bucket, tensors, room)
            data, base = self._encoder.encode(version, bucket, room)
            self.send(bucket.index, version, data, base)
            sparse.append(base is not None)
        assert self._engine.finish_update(TIMEOUT_S) == version
        return sparse

    @abstractmethod
    def send(self, index: int, version: int, data: Any, base: int | None) -> None:
        """Bring the engine what travels of a bucket."""

    @abstractmethod
    def copied_bytes(self) -> int:
        """What the engine keeps beside its parameters; of an engine in this process."""


class SparseUpdates(Updates):
    """Of buckets in host memory."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, DeltaEncoder(0.4))
        engine.prepare_receiver(f"{__name__}:{WatchedReceiver.__name__}", {"sparse": True})

    def send(self, index: int, version: int, data: Any, base: int | None) -> None:
        self._engine.load_bucket(index, cast(ByteArray, sealed(version, data, base=base)))

    def copied_bytes(self) -> int:
        images = WatchedReceiver.begun[0].images
        assert images is not None
        return images.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent(Remote):
    """The sender's own memory, which it fills with something else once a bucket is loaded."""

    data: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """How many."""
        return self.data.numel()

    @property
    def lent(self) -> bool:
        """As of IPC."""
        return True

    def fetch(self, process: int, device: torch.device) -> torch.Tensor:
        """Themselves."""
        assert (process, device.type) == (0, "cpu")
        return self.data


class FetchingReceiver:
    """The end of an engine whose processes fetch buckets by themselves; with an owner of copies, buckets may be sparse."""

    tests = ()

    def __init__(self, *, owner: str | None = None) -> None:
        self.holdings = Holdings(copies=owner)
        self._images = None if owner is None else Images(owner)

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """As an engine's end does."""
        return UpdateAssembly(manifest, version, expected, streams=True, images=self._images)

    def close(self) -> None:
        """Copies are those of vLLM's workers."""


class FetchedUpdates(Updates):
    """Of buckets that each process of an engine fetches, as between devices; the first two are whole."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine, DeviceDeltaEncoder(0.4, torch.device("cpu")))
        self._owner = f"engine {id(engine)}"
        engine.prepare_receiver(f"{__name__}:{FetchingReceiver.__name__}", {"owner": self._owner})

    def send(self, index: int, version: int, data: Any, base: int | None) -> None:
        send_lent(self._engine, index, version, data, base)

    def copied_bytes(self) -> int:
        return COPIES.size_bytes(self._owner)


def push_whole(engine: Engine, tensors: Mapping[str, torch.Tensor], *, lent: bool = False) -> None:
    """A whole update under the next version; ``lent``: its buckets stay in the sender's memory, as with IPC."""
    if lent:
        engine.prepare_receiver(f"{__name__}:{FetchingReceiver.__name__}", {})
    else:
        engine.prepare_receiver(PACKED_RECEIVER, {})
    manifest, version = manifest_of(dict(tensors), BUCKET_BYTES), engine.version() + 1
    engine.begin_update(manifest, version)
    for bucket in manifest.buckets:
        data = packed(bucket, dict(tensors))
        if lent:
            send_lent(engine, bucket.index, version, as_byte_tensor(data), None)
        else:
            engine.load_bucket(bucket.index, data)
    assert engine.finish_update(TIMEOUT_S) == version


def send_lent(engine: Engine, index: int, version: int, data: torch.Tensor, base: int | None) -> None:
    """A bucket, or what changed of it, in memory that gets other bytes once it is loaded."""
    sent = Lent(data=data.clone())
    engine.load_bucket(index, cast(ByteArray, Parcel(version=version, checksum=fingerprint(data), payload=sent, base=base)))
    sent.data.fill_(0xFF)
