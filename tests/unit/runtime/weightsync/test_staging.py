"""Copies between a device and shared segments: their order, who may touch a segment when, and what happens where CUDA refuses."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rljob_runtime.errors import CorruptedWeightsError, WeightSyncError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync import staging as staging_module
from rljob_runtime.weightsync.packing import pack, plan_buckets
from rljob_runtime.weightsync.parcel import ByteArray, UnprovenBytes, checksum, view
from rljob_runtime.weightsync.shared_memory import Segments, SharedBytes, remove
from rljob_runtime.weightsync.staging import CudaHostMemory, Staging
from rljob_runtime.weightsync.transports.shared_memory import SharedReceiver, SharedSender
from tests.support.fake_cuda import StrictFakeCuda

PREFIX = f"rljob-staging{os.getpid()}-"
CPU = torch.device("cpu")
SIZE = 1000
CHUNK = 300


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(staging_module, "CHUNK_BYTES", CHUNK)
    yield
    remove(PREFIX)


def staging(cuda: StrictFakeCuda) -> Staging:
    return Staging(CPU, cuda, cuda)


def some_bytes(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (SIZE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def is_mapped(segment: str) -> bool:
    return segment in Path("/proc/self/maps").read_text()


def test_chunks_are_hashed_while_later_ones_are_copied_and_all_is_there_at_the_end() -> None:
    segments, cuda = Segments.equal(PREFIX, 1, SIZE), StrictFakeCuda()
    one = staging(cuda)
    one.add(*segments.whole(0))
    data = some_bytes(1)
    assert one.off(data, segments.array(0, SIZE)) == checksum(data.numpy())
    assert bytes(segments.array(0, SIZE)) == bytes(data.numpy())
    assert cuda.events == ["lock", *["copy"] * 4, "wait 1", "wait 2", "wait 3", "wait 4", "drain"]
    one.close()
    assert cuda.locked == {}
    segments.close()


def test_a_reader_locks_a_segment_once_and_returns_when_it_may_be_filled_again() -> None:
    segments, cuda = Segments.equal(PREFIX, 2, SIZE), StrictFakeCuda()
    one = staging(cuda)
    for turn, seed in ((0, 1), (1, 2), (0, 3), (1, 4)):
        data = some_bytes(seed)
        segments.array(turn, SIZE)[:] = data.numpy()
        came = one.onto(segments.shared(turn, SIZE))
        segments.array(turn, SIZE)[:] = 0  # the fake finds copies that read this
        assert torch.equal(came, data)
    assert cuda.events.count("lock") == len(cuda.locked) == 2
    with pytest.raises(WeightSyncError, match="has 1000 bytes, 1001 were to be read"):
        one.onto(segments.shared(0, SIZE + 1))
    one.close()
    assert cuda.events[-2:] == ["unlock", "unlock"]
    segments.close()


def test_segments_that_were_replaced_by_larger_ones_are_unlocked_and_unmapped() -> None:
    segments, cuda = Segments.equal(PREFIX, 1, SIZE), StrictFakeCuda()
    one, old = staging(cuda), segments.shared(0, SIZE)
    one.onto(old)
    segments.close()
    larger = Segments.equal(PREFIX, 1, 2 * SIZE)
    assert is_mapped(old.segment)
    one.onto(larger.shared(0, 2 * SIZE))
    assert cuda.events == ["lock", *["copy"] * 4, "drain", "unlock", "lock", *["copy"] * 7, "drain"]
    assert list(cuda.locked.values()) == [2 * SIZE]
    assert not is_mapped(old.segment)
    one.forget(f"{PREFIX}other")
    assert cuda.locked
    one.forget(PREFIX)
    assert not cuda.locked
    one.close()
    larger.close()


def test_unproven_bytes_are_compared_before_they_are_handed_out_and_after_their_copies_have_ended() -> None:
    segments, cuda = Segments.equal(PREFIX, 1, SIZE), StrictFakeCuda()
    data, one = some_bytes(5), staging(cuda)
    segments.array(0, SIZE)[:] = data.numpy()
    name = segments.shared(0, SIZE).segment
    good = UnprovenBytes(segment=name, size_bytes=SIZE, checksum=checksum(data.numpy()), what="bucket 0")
    assert torch.equal(one.onto(good), data)
    segments.array(0, SIZE)[17] ^= 1
    with pytest.raises(CorruptedWeightsError, match="bucket 0 has checksum"):
        one.onto(good)
    assert cuda.events[-1] == "drain"
    one.close()
    segments.close()


@pytest.mark.parametrize("way", ["off", "onto"])
def test_copies_that_were_begun_have_ended_before_an_error_leaves(way: str) -> None:
    segments, cuda = Segments.equal(PREFIX, 1, SIZE), StrictFakeCuda(fails_at=2)
    one = staging(cuda)
    if way == "off":
        one.add(*segments.whole(0))
    copying: Mapping[str, Callable[[], object]] = {
        "off": lambda: one.off(some_bytes(1), segments.array(0, SIZE)),
        "onto": lambda: one.onto(segments.shared(0, SIZE)),
    }
    with pytest.raises(RuntimeError, match="a copy could not be begun"):
        copying[way]()
    assert cuda.events == ["lock", "copy", "copy", "drain"]
    one.close()
    assert cuda.locked == {}
    segments.close()


def test_where_cuda_refuses_everything_arrives_unlocked_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    segments, cuda = Segments.equal(PREFIX, 2, SIZE), StrictFakeCuda(refuses="cudaHostRegister: out of memory (2)")
    one, data = staging(cuda), some_bytes(1)
    with caplog.at_level(logging.WARNING):
        for turn in range(2):
            one.add(*segments.whole(turn))
            assert one.off(data, segments.array(turn, SIZE)) == checksum(data.numpy())
            assert torch.equal(one.onto(segments.shared(turn, SIZE)), data)
    name = segments.shared(0, 1).segment
    assert one.pageable == f"{SIZE} bytes of shared memory ({name}) cannot be page-locked: cudaHostRegister: out of memory (2)"
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [one.pageable]
    one.close()
    assert "unlock" not in cuda.events
    segments.close()


def test_memory_that_stays_locked_is_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    segments, cuda = Segments.equal(PREFIX, 1, SIZE), StrictFakeCuda()
    one = staging(cuda)
    one.add(*segments.whole(0))
    monkeypatch.setattr(cuda, "unlock", lambda address: "cudaHostUnregister: driver shutting down (4)")
    one.close()
    assert "stays page-locked until this process ends: cudaHostUnregister: driver shutting down (4)" in caplog.text
    segments.close()


class Source:
    """Weights on a device, one trainer rank."""

    rank, world_size = 0, 1

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.outs: list[object] = []

    def pack_buckets(self, buckets: Mapping[int, Bucket], out: Any = None, on_packed: Any = None) -> ByteArray | None:
        self.outs.append(type(out))
        pack(buckets[0], self.tensors, out, on_packed)
        return None


class NoRoom(Staging):
    """Of a device without free memory."""

    def room(self, size_bytes: int) -> torch.Tensor | None:
        return None


@pytest.mark.parametrize("kind", [Staging, NoRoom])
def test_a_sender_packs_on_its_device_and_what_it_left_of_the_turn_before_is_gone(
    kind: type[Staging], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends, reads = StrictFakeCuda(), StrictFakeCuda()
    monkeypatch.setattr(staging_module, "staging_for", lambda device: kind(CPU, sends, sends))
    manifest = plan_buckets([(f"model.layers.{i}.weight", "bfloat16", (7, 11 + i)) for i in range(3)], 200)
    source = Source({slot.name: torch.randn(slot.shape) for bucket in manifest.buckets for slot in bucket.slots})
    sender = SharedSender(source, manifest, prefix=PREFIX, senders=(0,), segments=2, dense_above=None)
    receiver = SharedReceiver(streams=True, tests=[sender.send(-1, 0)], proves_late=True)  # type: ignore[list-item]
    one = staging(reads)
    for version in (1, 2):
        source.tensors = {name: torch.randn_like(tensor) for name, tensor in source.tensors.items()}
        update = receiver.begin(manifest, version, None)
        for bucket in manifest.buckets:
            parcel = sender.send(version, bucket.index)
            update.take(bucket.index, parcel)  # type: ignore[arg-type]
            [(_, payload)] = update.receive(0.0)
            assert isinstance(payload, UnprovenBytes)
            wanted = np.zeros(bucket.size_bytes, dtype=np.uint8)
            pack(bucket, source.tensors, wanted)
            assert bytes(one.onto(payload).numpy()) == bytes(view(payload)) == bytes(wanted)
    assert set(source.outs) == {torch.Tensor if kind is Staging else np.ndarray}
    assert (sends.events.count("lock"), reads.events.count("lock")) == (2, 2)
    sender.close()
    one.close()
    assert sends.locked == reads.locked == {}


def test_the_runtime_says_why_it_locks_nothing_and_its_error_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls the real bindings of torch, on a machine that has no GPU or one where address 0 cannot be locked."""
    forgotten = []

    class Runtime:
        def __init__(self, name: str) -> None:
            self.cudaGetLastError = lambda: forgotten.append(name)

    monkeypatch.setattr(ctypes, "CDLL", Runtime)
    if not torch.cuda.is_available():
        assert str(CudaHostMemory().lock(0, 4096)).startswith("cudaHostRegister cannot be called: ")
    if torch.version.cuda is None:
        return
    monkeypatch.setattr(torch.cuda, "cudart", lambda: torch._C._cudart)  # type: ignore[attr-defined]
    for call, said in (("cudaHostRegister", CudaHostMemory().lock(0, 4096)), ("cudaHostUnregister", CudaHostMemory().unlock(0))):
        assert said is not None
        assert said.startswith(f"{call}: ")
        assert said.endswith(")")
    assert forgotten == [f"libcudart.so.{torch.version.cuda.partition('.')[0]}"] * 2


def test_shared_bytes_without_a_segment_are_an_error() -> None:
    with pytest.raises(WeightSyncError, match="none cannot be read by process"):
        staging(StrictFakeCuda()).onto(SharedBytes(segment=f"{PREFIX}none", size_bytes=1))
