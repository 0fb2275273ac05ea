"""A sync in which something breaks: an error that names it, or a repetition; either way the next sync puts all engines right."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import CorruptedWeightsError, DeadlineError, EngineDiedError, WeightSyncError, WorkerLostError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.group import MEMBERSHIPS
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.parcel import Parcel
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import ByteArray, SyncLink, TransportSettings, make_end
from rljob_runtime.weightsync.transports.collective import HOST, Broadcast, NcclTransport, TcpTransport
from rljob_runtime.weightsync.transports.ipc import Export, IpcTransport
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport
from tests.support.pace import HANG_S

MANIFEST = plan_buckets([(f"model.layers.{i}.weight", "float32", (50,)) for i in range(5)], 256)
TRANSPORTS: list[Callable[[TransportSettings], Any]] = [ObjectStoreTransport, SharedMemoryTransport, TcpTransport]
BETWEEN_DEVICES: list[Callable[[TransportSettings], Any]] = [NcclTransport, IpcTransport]
"""Which move whole buckets alone."""
CALLS = ["prepare_receiver", "begin_update", "load_bucket", "finish_update", "score"]
"""Of an engine, by phase: prepare, receive (before, while and after buckets come), probe."""
SENDER_CALLS = ["prepare_sender", "send_weights", "compute_logprobs"]
"""Of a trainer rank: prepare, send, probe."""
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


class Trainer:
    """All its numbers are ``value``; with ``corrupts`` that many parcels have bytes that are not those of their checksum."""

    rank, world_size = 0, 1

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.corrupts = 0
        self.fails = 0
        self.faults = Faults()
        self._sender: Any = None

    def compute_logprobs(self, tokens: np.ndarray, lengths: np.ndarray, temperature: float) -> np.ndarray:
        self.faults.call("compute_logprobs")
        return np.zeros(len(tokens), dtype=np.float32)

    def prepare_sender(self, sender: str, manifest: Any, settings: Any) -> None:
        self.faults.call("prepare_sender")
        self.close_sender()
        self._sender = make_end(sender, self, manifest, **settings)

    def close_sender(self) -> None:
        if self._sender is not None:
            self._sender.close()

    def send_weights(self, version: int, part: int) -> Any:
        if version > 0:
            self.faults.call("send_weights")
        if version > 0 and part == 3 and self.fails:
            self.fails -= 1
            raise WeightSyncError("bucket 3 does not fit the trainer's model")
        sent = self._sender.send(version, part)
        if version <= 0 or part != 2 or not self.corrupts:
            return sent
        self.corrupts -= 1
        return corrupted(sent) if isinstance(sent, Parcel) else {reader: corrupted(parcel) for reader, parcel in sent.items()}

    def pack_buckets(self, buckets: Mapping[int, Bucket], out: ByteArray | None = None, on_packed: Any = None) -> ByteArray:
        bucket = buckets[self.rank]
        out = np.zeros(bucket.size_bytes, dtype=np.uint8) if out is None else out
        for slot in bucket.slots:
            out[slot.offset_bytes : slot.offset_bytes + slot.size_bytes] = self.value
        return out


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
        for worker in (self.training, *self.workers):
            worker.stop()


WAYS = [(make, dense) for make in TRANSPORTS for dense in (None, 1.0)] + [(make, None) for make in BETWEEN_DEVICES]


@pytest.fixture(scope="module", autouse=True)
def no_dns() -> Iterator[None]:
    """Torch asks for the name of 127.0.0.1 at each connection to a store: 5 s where no DNS server answers. Without effect, but for
    the time, where this process has used the resolver before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "attempts:0")
        yield


@pytest.fixture(params=WAYS, ids=lambda p: f"{p[0].__name__}-{p[1]}")
def setting(request: pytest.FixtureRequest) -> Any:
    made = Setting(*request.param)
    yield made
    made.stop()


@pytest.mark.parametrize("method", CALLS)
async def test_an_engine_killed_in_any_phase_is_left_out_and_comes_back_with_all_weights(setting: Setting, method: str) -> None:
    setting.engines[1].faults.dies_in = method
    setting.engines[1].faults.passes = 0 if method == "prepare_receiver" else 1
    await setting.publish(1)
    if not setting.lost:  # load_bucket is made several times a sync, the others once
        await setting.publish(2)
    assert setting.lost == [1]
    version = setting.engines[0].version()
    assert setting.serves(0) == (version, {version})
    setting.replace_engine()
    assert await setting.publisher.catch_up(1)
    assert setting.serves(1) == (version, {version})
    await setting.publish(version + 1)
    assert [setting.serves(i) for i in (0, 1)] == [(version + 1, {version + 1})] * 2
    assert setting.warnings == []  # no other transport took its place


@pytest.mark.parametrize("method", SENDER_CALLS)
async def test_a_trainer_killed_in_any_phase_is_named_and_the_next_one_sends_all(setting: Setting, method: str) -> None:
    """Buckets before the third have been sent; engines answer with one version, and hold all of the next."""
    if method == "prepare_sender":
        setting.trainer.faults.dies_in = method
    else:
        await setting.publish(1)
        setting.trainer.faults.dies_in, setting.trainer.faults.passes = method, 2 if method == "send_weights" else 0
    with pytest.raises(WorkerLostError, match="trainer-0"):
        await setting.publish(2)
    served = {"prepare_sender": 0, "send_weights": 1, "compute_logprobs": 2}[method]
    assert [engine.version() for engine in setting.engines] == [served] * 2
    assert setting.lost == []
    setting.replace_trainer()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


@pytest.mark.parametrize("method", CALLS[:-1])
async def test_an_engine_that_does_not_answer_in_time_is_named_and_takes_the_next_sync(setting: Setting, method: str) -> None:
    if method != "prepare_receiver":
        await setting.publish(1)
    faults = setting.engines[1].faults
    faults.hangs_in = method
    # Before engines prepare, the trainer's ranks do, which has to be done by then.
    setting.publisher.timeout_s = SHORT_S * (8 if method == "prepare_receiver" else 1)
    with pytest.raises(WeightSyncError, match=r"spec\.weightSync\.timeoutSeconds\); it waited for .*engine-1"):
        await setting.publish(2)
    assert setting.engines[1].version() < 2
    setting.publisher.timeout_s, faults.hangs_in = HANG_S, None
    faults.let_go.set()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def test_a_corrupted_bucket_is_sent_again(setting: Setting) -> None:
    assert (await setting.publish(1))["sync/resent"] == 0
    setting.trainer.corrupts = 1
    assert (await setting.publish(2))["sync/resent"] == 1
    assert [setting.serves(i) for i in (0, 1)] == [(2, {2})] * 2
    assert len(setting.warnings) == 1
    assert setting.warnings[0].startswith("weights v2 are sent again: bucket 2 of ")
    assert (await setting.publish(3))["sync/resent"] == 0
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def test_a_bucket_that_stays_corrupted_is_an_error_and_the_next_sync_is_whole(setting: Setting) -> None:
    await setting.publish(1)
    setting.trainer.corrupts = 2
    with pytest.raises(CorruptedWeightsError, match="its bytes changed on the way"):
        await setting.publish(2)
    assert [engine.version() for engine in setting.engines] == [1, 1]
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def test_a_trainer_that_fails_half_way_leaves_engines_that_take_the_next_sync(setting: Setting) -> None:
    await setting.publish(1)
    setting.trainer.fails = 1
    with pytest.raises(WeightSyncError, match="bucket 3 does not fit the trainer's model"):
        await setting.publish(2)
    assert [engine.version() for engine in setting.engines] == [1, 1]
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


@pytest.mark.parametrize(
    "error", [TimeoutError("the user's own lock"), DeadlineError("bucket 2 did not end in time")], ids=["plain", "own"]
)
async def test_a_timeout_of_the_transport_is_not_reported_as_the_deadline_of_the_sync(error: TimeoutError) -> None:
    class Late(ObjectStoreTransport):
        async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
            raise error

    setting = Setting(Late, None)
    with pytest.raises(TimeoutError) as found:
        await setting.publish(1)
    assert found.value is error
    setting.stop()


class Killed(Faulty):
    """Its process ends while it takes a bucket: its connections close before the driver hears of it."""

    def load_bucket(self, *args: Any) -> None:
        _, parcel = args
        if self.faults.dies_in == "load_bucket" and not self.faults.passes:
            rank_of_the_second = 2
            MEMBERSHIPS.join(parcel.payload.meeting, rank_of_the_second, HOST).close()
        super().load_bucket(*args)


@pytest.mark.parametrize("dense_above", [None, 1.0], ids=["dense", "sparse"])
async def test_the_loss_of_the_middle_of_a_chain_closes_it_around_the_gap(dense_above: float | None) -> None:
    """In the same sync, and in the next ones; the place is filled again by an engine that joins."""
    setting = Setting(TcpTransport, dense_above, [Faulty(), Killed(), Faulty()])
    await setting.publish(1)
    setting.engines[1].faults.dies_in, setting.engines[1].faults.passes = "load_bucket", 2
    for version in (2, 3):
        await setting.publish(version)
        assert setting.lost == [1]
        assert [setting.serves(i) for i in (0, 2)] == [(version, {version})] * 2
    setting.replace_engine()
    assert await setting.publisher.catch_up(1)
    await setting.publish(4)
    assert [setting.serves(i) for i in (0, 1, 2)] == [(4, {4})] * 3
    assert setting.warnings == []
    setting.stop()


async def test_the_deadline_of_a_chain_names_the_engine_that_keeps_the_others_waiting() -> None:
    """Of three whose calls have not come back."""
    setting = Setting(TcpTransport, None, [Faulty(), Faulty(), Faulty()])
    await setting.publish(1)
    setting.engines[1].faults.hangs_in = "load_bucket"
    setting.publisher.timeout_s = SHORT_S
    with pytest.raises(WeightSyncError, match=r"it waited for engine-1 to send 200 more of 200 bytes$"):
        await setting.publish(2)
    setting.publisher.timeout_s, setting.engines[1].faults.hangs_in = HANG_S, None
    setting.engines[1].faults.let_go.set()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1, 2)] == [(3, {3})] * 3
    setting.stop()


async def test_sparse_syncs_report_the_bytes_that_traveled() -> None:
    setting = Setting(ObjectStoreTransport, 1.0)
    whole = 2.0 * MANIFEST.total_bytes
    assert (await setting.publish(1))["sync/bytes"] == whole
    assert (await setting.publish(2))["sync/bytes"] == whole  # every number changed
    assert (await setting.publish(2))["sync/bytes"] == 0
    setting.stop()
