"""Segments of a node: read in place by other processes, removed whatever happens, and what stands in for them where they cannot be had."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import CorruptedWeightsError, WeightSyncError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.parcel import BLOCK_BYTES, Parcel, sealed, view
from rljob_runtime.weightsync.shared_memory import FOLDER, Segments, SharedBytes, remove
from rljob_runtime.weightsync.transport import ByteArray, SyncLink, TransportSettings
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport
from tests.support.pace import HANG_S
from tests.support.sending_ranks import SendingRank

PREFIX = f"rljob-test{os.getpid()}-"
TENSORS = [(f"model.layers.{i}.weight", "bfloat16", (8, 5 + i)) for i in range(7)]


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    yield
    remove(PREFIX)


def left() -> list[str]:
    return sorted(path.name for path in FOLDER.glob(f"{PREFIX}*"))


def test_another_process_reads_what_lies_there_now() -> None:
    segments = Segments.equal(PREFIX, 2, 1000)
    shared, unmapped = segments.shared(1, 600), segments.shared(0, 1).segment
    reading = f"""
import sys
from rljob_runtime.weightsync.shared_memory import SharedBytes
data = SharedBytes(segment={shared.segment!r}, size_bytes=600).view()
for _ in sys.stdin:
    print(data.sum(), data.flags.writeable, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", reading], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for value in (3, 5):
            segments.array(1, 1000)[:] = value
            reader.stdin.write("look\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{value * 600} False\n"
        reader.stdin.close()
    assert shared.view().sum() == 5 * 600  # the reader's end has not removed it
    segments.close()
    assert left() == []
    with pytest.raises(WeightSyncError, match=f"{unmapped} cannot be read"):
        SharedBytes(segment=unmapped, size_bytes=1).view()


def test_a_killed_writer_leaves_no_process_and_its_segments_go_with_the_run() -> None:
    making = f"""
import psutil, sys
from rljob_runtime.weightsync.shared_memory import Segments
segments = Segments.equal({PREFIX!r}, 2, 5000)
print(len(psutil.Process().children()), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", making], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "0\n"
        writer.send_signal(signal.SIGKILL)
    assert len(left()) == 2
    remove(PREFIX)
    assert left() == []


def test_what_an_earlier_attempt_left_is_removed() -> None:
    (FOLDER / f"{PREFIX}4711-0").write_bytes(b"old")
    segments = Segments.equal(PREFIX, 1, 10)
    assert left() == [segments.shared(0, 10).segment]
    segments.close()


def test_more_than_the_node_has_is_an_error_with_both_sizes() -> None:
    with pytest.raises(WeightSyncError, match=rf"{2**61} bytes of shared memory \(2 segments\) cannot be had from /dev/shm, which has"):
        Segments.equal(PREFIX, 2, 2**60)
    assert left() == []


def test_changed_bytes_are_found() -> None:
    manifest = plan_buckets([("weight", "uint8", (64,))], 1024)
    data = np.arange(64, dtype=np.uint8)
    parcel = sealed(3, data)
    data[17] ^= 1
    with pytest.raises(CorruptedWeightsError, match="bucket 0 of 1 of weights v3"):
        UpdateAssembly(manifest, 3, None).take(0, parcel)
    with pytest.raises(WeightSyncError, match="is of weights v3, the update is to version 4"):
        UpdateAssembly(manifest, 4, None).take(0, parcel)
    shared = Parcel(version=3, checksum=0, payload=SharedBytes(segment=f"{PREFIX}none", size_bytes=64))
    with pytest.raises(WeightSyncError, match="cannot be read by process"):
        UpdateAssembly(manifest, 3, None).take(0, shared)


def test_what_lies_in_shared_memory_is_compared_as_it_comes_or_by_all_that_load_it() -> None:
    manifest, segments = plan_buckets([("weight", "uint8", (BLOCK_BYTES + 64,))], 1024), Segments.equal(PREFIX, 1, BLOCK_BYTES + 64)
    size = manifest.buckets[0].size_bytes
    data = segments.array(0, size)
    data[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    parcel = sealed(3, data, segments.shared(0, size))
    update = UpdateAssembly(manifest, 3, None, streams=True, proves_late=True)
    update.take(0, parcel)
    [(_, payload)] = update.receive(0.0)
    assert bytes(view(payload)) == bytes(data)
    data[BLOCK_BYTES + 7] ^= 1
    with pytest.raises(CorruptedWeightsError, match=rf"bucket 0 of 1 of weights v3 \({size} bytes\) has checksum"):
        view(payload)
    with pytest.raises(CorruptedWeightsError, match="bucket 0 of 1 of weights v3"):
        UpdateAssembly(manifest, 3, None, streams=True).take(0, parcel)
    with pytest.raises(WeightSyncError, match="arrived as 64 shared bytes"):
        UpdateAssembly(manifest, 3, None, proves_late=True).take(0, sealed(3, data[:64], segments.shared(0, 64)))
    segments.close()


class Trainer(SendingRank):
    """A rank of a trainer whose weights are random bytes by version."""

    version = 0

    def fill(self, bucket: Bucket, out: ByteArray) -> None:
        random = np.random.default_rng([self.version, bucket.index])
        for slot in bucket.slots:
            out[slot.offset_bytes : slot.offset_bytes + slot.size_bytes] = random.integers(0, 256, slot.size_bytes, dtype=np.uint8)


class Elsewhere(FakeEngine):
    """On another node than planned."""

    num_tests = 0

    def prepare_receiver(self, receiver: str, settings: Any) -> None:
        if "tests" in settings:
            self.num_tests += 1
            raise WeightSyncError("shared memory x cannot be read by process 1")
        super().prepare_receiver(receiver, settings)


def run(
    engines: list[FakeEngine],
    bucket_bytes: int,
    *,
    while_generating: bool,
    ranks: int = 1,
    senders: tuple[int, ...] = (0,),
    kind: Callable[[TransportSettings], Any] = SharedMemoryTransport,
    dense_above: float | None = None,
    prepared: int = 1,
) -> tuple[list[Trainer], Any, list[int]]:
    trainers = [Trainer(rank) for rank in range(ranks)]
    workers = [InProcessWorker(f"engine-{i}", engine) for i, engine in enumerate(engines)]
    training = [InProcessWorker(f"trainer-{trainer.rank}", trainer) for trainer in trainers]
    link = SyncLink(
        trainers=training,
        engines=workers,
        manifest=plan_buckets(TENSORS, bucket_bytes),
        timeout_s=HANG_S,
        on_running="recompute",
        goes_on_without=lambda engine, error: False,
    )
    run = PREFIX.split("-")[1]
    transport = kind(TransportSettings(run=run, while_generating=while_generating, senders=senders, dense_above=dense_above))
    counts = []

    async def sync() -> None:
        for _ in range(prepared):
            await transport.prepare(link)
        for version in (1, 2, 3):
            for trainer in trainers:
                trainer.version = version
            assert await transport.transfer(version, link) == dict.fromkeys(range(len(engines)), version)
            counts.append(len(left()))
            for engine in engines:
                assert [(b.index, bytes(d)) for b, d in engine.received] == [
                    (bucket.index, bytes(trainers[0].packed(bucket))) for bucket in link.manifest.buckets
                ]

    try:
        asyncio.run(sync())
    finally:
        for worker in (*training, *workers):
            worker.stop()
    return trainers, transport, counts


@pytest.mark.parametrize(("while_generating", "bucket_bytes", "segments"), [(False, 128, 2), (True, 128, 7), (False, 10_000, 1)])
def test_every_engine_reads_the_same_segments(while_generating: bool, bucket_bytes: int, segments: int) -> None:
    (trainer,), transport, counts = run([FakeEngine(), FakeEngine()], bucket_bytes, while_generating=while_generating)
    assert transport.warning is None
    assert counts == [segments] * 3
    trainer.close_sender()
    assert left() == []


@pytest.mark.parametrize("kind", [SharedMemoryTransport, ObjectStoreTransport])
@pytest.mark.parametrize("dense_above", [None, 0.5])
@pytest.mark.parametrize(("ranks", "senders", "num_engines"), [(2, (0, 1), 1), (1, (0,), 2), (4, (0, 1, 2, 3), 2), (4, (0, 2), 1)])
@pytest.mark.parametrize("while_generating", [False, True])
def test_every_sender_brings_its_part(
    kind: Any, dense_above: float | None, ranks: int, senders: tuple[int, ...], num_engines: int, while_generating: bool
) -> None:
    engines = [FakeEngine() for _ in range(num_engines)]
    trainers, transport, counts = run(
        engines, 128, while_generating=while_generating, ranks=ranks, senders=senders, kind=kind, dense_above=dense_above
    )
    assert transport.warning is None
    if kind is SharedMemoryTransport:
        parts = -(-7 // len(senders))
        assert counts == [7 if while_generating or (parts == 2 and len(senders) == 4) else 2 * len(senders)] * 3
    for trainer in trainers:
        trainer.close_sender()
    assert left() == []


def test_an_engine_that_cannot_read_it_gets_its_weights_through_the_object_store() -> None:
    elsewhere = Elsewhere()
    _, transport, counts = run([FakeEngine(), elsewhere], 128, while_generating=False, prepared=3)
    assert transport.warning is not None
    assert transport.warning.endswith("failed its test: shared memory x cannot be read by process 1")
    assert elsewhere.num_tests == 2, "a test that fails again is not repeated"
    assert counts == [0] * 3
