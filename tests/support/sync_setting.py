"""A trainer and engines of this process with faults in the calls of a sync, and the publisher over them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import EngineDiedError, WeightSyncError, WorkerLostError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.parcel import Parcel
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import ByteArray, TransportSettings
from rljob_runtime.weightsync.transports.collective import Broadcast
from rljob_runtime.weightsync.transports.ipc import Export
from tests.support.pace import HANG_S
from tests.support.sending_ranks import SendingRank

MANIFEST = plan_buckets([(f"model.layers.{i}.weight", "float32", (50,)) for i in range(5)], 256)
SHORT_S = 0.5
"""Of a sync that cannot end."""


class Faults:
    """What happens in calls of a worker: its process ends in one of them, or one takes until it is let go."""

    dies_in: str | None = None
    passes = 0
    """Calls of that method before."""
    hangs_in: str | None = None

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def call(self, method: str) -> None:
        if method == self.hangs_in:
            self.let_go.wait(HANG_S)
        if method == self.dies_in:
            self.passes -= 1
            if self.passes < 0:
                raise EngineDiedError("signal 9")


class Trainer(SendingRank):
    """All its numbers are ``value``; with ``corrupts`` that many parcels have bytes that are not those of their checksum."""

    def __init__(self, value: int = 0, rank: int = 0) -> None:
        super().__init__(rank)
        self.value = value
        self.corrupts = 0
        self.fails = 0
        self.faults = Faults()

    def compute_logprobs(self, tokens: np.ndarray, lengths: np.ndarray, temperature: float) -> np.ndarray:
        self.faults.call("compute_logprobs")
        return np.zeros(len(tokens), dtype=np.float32)

    def prepare_sender(self, sender: str, manifest: Any, settings: Any) -> None:
        self.faults.call("prepare_sender")
        super().prepare_sender(sender, manifest, settings)

    def send_weights(self, version: int, part: int) -> Any:
        if version > 0:
            self.faults.call("send_weights")
        if version > 0 and part == 3 and self.fails:
            self.fails -= 1
            raise WeightSyncError("bucket 3 does not fit the trainer's model")
        sent = super().send_weights(version, part)
        if version <= 0 or part != 2 or not self.corrupts:
            return sent
        self.corrupts -= 1
        return corrupted(sent) if isinstance(sent, Parcel) else {reader: corrupted(parcel) for reader, parcel in sent.items()}

    def fill(self, bucket: Bucket, out: ByteArray) -> None:
        for slot in bucket.slots:
            out[slot.offset_bytes : slot.offset_bytes + slot.size_bytes] = self.value


def corrupted(parcel: Parcel) -> Parcel:
    """With a checksum of other bytes."""
    payload = parcel.payload
    if isinstance(payload, Broadcast | Export):
        payload = replace(payload, sent_checksum=parcel.checksum ^ 1)
    return replace(parcel, checksum=parcel.checksum ^ 1, payload=payload)


class Faulty(FakeEngine):
    """An engine with faults in the calls of a sync."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = Faults()

    def prepare_receiver(self, *args: Any) -> None:
        self.faults.call("prepare_receiver")
        super().prepare_receiver(*args)

    def begin_update(self, *args: Any) -> None:
        self.faults.call("begin_update")
        super().begin_update(*args)

    def load_bucket(self, *args: Any) -> None:
        self.faults.call("load_bucket")
        super().load_bucket(*args)

    def finish_update(self, *args: Any) -> int:
        self.faults.call("finish_update")
        return super().finish_update(*args)

    def score(self, *args: Any) -> list[tuple[float, ...]]:
        self.faults.call("score")
        return super().score(*args)


class Setting:
    """A trainer, engines, two by default, and a publisher that goes on without an engine."""

    def __init__(self, make: Callable[[TransportSettings], Any], dense_above: float | None, engines: Sequence[Faulty] = ()) -> None:
        self.trainer = Trainer()
        self.engines = list(engines) or [Faulty(), Faulty()]
        self.workers = [InProcessWorker(f"engine-{i}", engine) for i, engine in enumerate(self.engines)]
        self.training = InProcessWorker("trainer-0", self.trainer)
        self.lost: list[int] = []
        self.warnings: list[str] = []
        self._make, self._dense_above = make, dense_above
        self.publisher = self._published_by()

    def _published_by(self) -> WeightPublisher:
        settings = TransportSettings(
            run=f"faults{os.getpid()}", while_generating=False, dense_above=self._dense_above, neighbors=((0,),) * len(self.engines)
        )
        return WeightPublisher(
            trainers=[self.training],
            engines=self.workers,
            manifest=MANIFEST,
            transport=self._make(settings),
            timeout_s=HANG_S,
            probe=ProbeConfig(every_syncs=1, limits=ProbeLimits(mean=100.0, tail=100.0), sequences=((5, 6, 7),)),
            goes_on_without=self._goes_on_without,
            warn=self.warnings.append,
        )

    def _goes_on_without(self, engine: int, error: WorkerLostError) -> bool:
        self.lost.append(engine)
        return True

    async def publish(self, version: int) -> dict[str, float]:
        """A sync and its probe."""
        self.trainer.value = version
        measured = await self.publisher.measured(await self.publisher.publish(version))
        self.publisher.expect()
        await self.publisher.probe(version)
        return measured

    def replace_engine(self) -> None:
        """A new process in the place of the second."""
        self.engines[1] = Faulty()
        self.workers[1].target = self.engines[1]

    def replace_trainer(self) -> None:
        """A new process in the place of the trainer's, without what the old one held, and a publisher, as of an attempt that goes on."""
        self.trainer = Trainer(self.trainer.value)
        self.training.target = self.trainer
        self.publisher = self._published_by()

    def serves(self, engine: int) -> tuple[int, set[int]]:
        """Version and numbers of an engine."""
        found = self.engines[engine]
        return found.version(), {int(byte) for bucket, data in found.received for byte in data[: bucket.slots[0].size_bytes]}

    def stop(self) -> None:
        for faults in (self.trainer.faults, *(engine.faults for engine in self.engines)):
            faults.let_go.set()
        self.trainer.close_sender()
        for engine in self.engines:
            engine.shutdown()
        for worker in (self.training, *self.workers):
            worker.stop()
