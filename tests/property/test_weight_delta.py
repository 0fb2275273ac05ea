"""Engines hold the trainer's bits after any order of dense and sparse syncs, restarts, lost and repeated ones, by every transport."""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import CorruptedWeightsError, WeightSyncError, WholeNeededError
from rljob_runtime.offload.copies import HostCopies
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.delta import DeltaEncoder, Images
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.packing import pack, plan_buckets, unpack
from rljob_runtime.weightsync.parcel import sealed
from rljob_runtime.weightsync.staged_delta import StagedDeltaEncoder
from rljob_runtime.weightsync.transport import ByteArray, SyncLink, TransportSettings
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport
from tests.support.pace import HANG_S
from tests.support.sending_ranks import SendingRank

TRANSPORTS: list[Callable[[TransportSettings], Any]] = [ObjectStoreTransport, SharedMemoryTransport]


class Trainer(SendingRank):
    """A model of random bits; a step changes some numbers, also to the other zero, to infinities and from one NaN to another."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(seed)
        self.integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[dtype]
        self.tensors = {
            "model.embed_tokens.weight": self.random_bits((9, 7)).view(dtype),
            "model.layers.0.weight": self.random_bits((16, 5)).view(dtype),
            "model.layers.1.weight": self.random_bits((1,)).view(dtype),
            "model.layers.2.weight": self.random_bits((31, 3)).view(dtype),
        }

    def random_bits(self, shape: tuple[int, ...]) -> torch.Tensor:
        info = torch.iinfo(self.integers)
        return torch.randint(info.min, info.max, shape, generator=self._random, dtype=self.integers)

    def step(self, changed: float) -> None:
        for tensor in self.tensors.values():
            bits = tensor.view(self.integers)
            where = torch.rand(bits.shape, generator=self._random) < changed
            bits[where] = self.random_bits(tuple(bits.shape))[where]

    @property
    def specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in self.tensors.items()]

    def fill(self, bucket: Bucket, out: ByteArray) -> None:
        pack(bucket, self.tensors, out)


def held(engine: FakeEngine, integers: torch.dtype) -> dict[str, list[int]]:
    return {
        name: tensor.contiguous().view(integers).reshape(-1).tolist()
        for bucket, data in engine.received
        for name, tensor in unpack(bucket, data)
    }


STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.02, 0.3, 1.0]), st.sampled_from(["sync", "restart", "again"])), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    steps=STEPS,
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bucket_bytes=st.sampled_from([64, 200, 5000]),
    while_generating=st.booleans(),
    dense_above=st.sampled_from([None, 0.0, 0.25, 1.0]),
    make=st.sampled_from(TRANSPORTS),
)
def test_engines_hold_the_trainers_bits_after_any_syncs(
    steps: list[tuple[float, str]],
    seed: int,
    dtype: torch.dtype,
    bucket_bytes: int,
    while_generating: bool,
    dense_above: float | None,
    make: Callable[[TransportSettings], Any],
) -> None:
    trainer = Trainer(seed, dtype)
    engines = [FakeEngine(), FakeEngine()]
    workers = [InProcessWorker(f"engine-{i}", engine) for i, engine in enumerate(engines)]
    training = InProcessWorker("trainer-0", trainer)
    link = SyncLink(
        trainers=[training],
        engines=workers,
        manifest=plan_buckets(trainer.specs, bucket_bytes),
        timeout_s=HANG_S,
        on_running="recompute",
        goes_on_without=lambda engine, error: False,
    )
    transport = make(TransportSettings(run=f"delta{os.getpid()}", while_generating=while_generating, dense_above=dense_above))

    async def run() -> None:
        await transport.prepare(link)
        for version, (changed, what) in enumerate(steps):
            trainer.step(changed)
            if what == "restart":
                engines[0] = FakeEngine()
                workers[0].stop()
                workers[0] = InProcessWorker("engine-0", engines[0])
                link.join(0, workers[0])
                await transport.prepare(link)
            for _ in range(2 if what == "again" else 1):
                assert await transport.transfer(version, link) == {0: version, 1: version}
            wanted = {name: tensor.view(trainer.integers).reshape(-1).tolist() for name, tensor in trainer.tensors.items()}
            assert [held(engine, trainer.integers) for engine in engines] == [wanted, wanted]

    try:
        asyncio.run(run())
    finally:
        trainer.close_sender()
        for worker in (training, *workers):
            worker.stop()
    assert transport.warning is None


def encoded(changed: float, dense_above: float, dtype: torch.dtype = torch.bfloat16) -> tuple[int, int | None, int]:
    """Bytes that travel, what they change, and bytes of the bucket."""
    trainer = Trainer(3, dtype)
    trainer.tensors = {"weight": trainer.random_bits((100, 100)).view(dtype)}
    bucket = plan_buckets(trainer.specs, 2**20).buckets[0]
    encoder = DeltaEncoder(dense_above)
    data, base = encoder.encode(4, bucket, trainer.packed(bucket))
    assert (data.size, base) == (bucket.size_bytes, None)
    trainer.tensors["weight"].view(trainer.integers)[: int(100 * changed)] ^= 1
    data, base = encoder.encode(5, bucket, trainer.packed(bucket))
    return data.size, base, bucket.size_bytes


@pytest.mark.parametrize(("dtype", "number"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_what_changed_travels_as_indexes_and_numbers(dtype: torch.dtype, number: int) -> None:
    whole = 10_000 * number
    assert encoded(0.1, 0.2, dtype) == (1000 * (4 + number), 4, whole)
    assert encoded(0.0, 0.2, dtype) == (0, 4, whole)
    assert encoded(0.2, 0.2, dtype) == (2000 * (4 + number), 4, whole)
    assert encoded(0.21, 0.2, dtype) == (whole, None, whole)
    assert encoded(0.9, 1.0, dtype) == (whole, None, whole)  # smaller than what changed with its indexes


@settings(max_examples=60, deadline=None)
@given(
    changed=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=DeviceDeltaEncoder.whole_first, max_size=6),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bucket_bytes=st.sampled_from([64, 200, 5000]),
    dense_above=st.sampled_from([0.0, 0.25, 1.0]),
    piece=st.sampled_from([1, 50, 1 << 22]),
)
def test_what_changed_is_the_same_on_a_device(
    changed: list[float], seed: int, dtype: torch.dtype, bucket_bytes: int, dense_above: float, piece: int
) -> None:
    """Bytes, what they change, and which buckets are whole; but for the second version, which is always whole there."""
    trainer = Trainer(seed, dtype)
    host, device = DeltaEncoder(dense_above), DeviceDeltaEncoder(dense_above, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rljob_runtime.weightsync.device_delta.PIECE_NUMBERS", piece)
        for version, part in enumerate(changed):
            trainer.step(part)
            for bucket in plan_buckets(trainer.specs, bucket_bytes).buckets:
                room, own = host.room(bucket), device.room(bucket)
                trainer.fill(bucket, room)
                trainer.fill(bucket, own.numpy())
                expected, base = host.encode(version, bucket, room)
                found, device_base = device.encode(version, bucket, own, lambda size: torch.full((size,), 7, dtype=torch.uint8))
                if version < DeviceDeltaEncoder.whole_first:
                    expected, base = trainer.packed(bucket), None
                assert (device_base, found.numpy().tobytes()) == (base, expected.tobytes())


class LockedMemory:
    """In place of the CUDA runtime: what is page-locked; ``refuses`` all if so."""

    def __init__(self, refuses: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.refuses = refuses

    def lock(self, address: int, size_bytes: int) -> str | None:
        if self.refuses:
            return "out of memory"
        assert address % mmap.PAGESIZE == 0
        assert address not in self.locked
        self.locked[address] = size_bytes
        return None

    def unlock(self, address: int) -> str | None:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        assert any(int(first, 16) <= address < int(end, 16) for first, end in ranges), "the memory is still there"
        return None if self.locked.pop(address, None) is not None else "not locked"


@settings(max_examples=60, deadline=None)
@given(
    changed=st.lists(st.sampled_from([0.0, 0.02, 0.3, 1.0]), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    bucket_bytes=st.sampled_from([64, 200, 5000]),
    dense_above=st.sampled_from([0.0, 0.25, 1.0]),
    chunk=st.sampled_from([24, 1 << 20]),
    refuses=st.booleans(),
    in_place=st.booleans(),
)
def test_what_changed_is_the_same_where_the_bucket_is_on_a_device_and_its_copy_is_not(
    changed: list[float], seed: int, dtype: torch.dtype, bucket_bytes: int, dense_above: float, chunk: int, refuses: bool, in_place: bool
) -> None:
    trainer, memory = Trainer(seed, dtype), LockedMemory(refuses)
    host, staged = DeltaEncoder(dense_above), StagedDeltaEncoder(dense_above, torch.device("cpu"), HostCopies(), memory)
    place = (lambda size: np.full(size, 7, dtype=np.uint8)) if in_place else None
    buckets = plan_buckets(trainer.specs, bucket_bytes).buckets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rljob_runtime.weightsync.staged_delta.CHUNK_BYTES", chunk)
        for version, part in enumerate(changed):
            trainer.step(part)
            for bucket in buckets:
                room, own = host.room(bucket), staged.room(bucket)
                trainer.fill(bucket, room)
                trainer.fill(bucket, own.numpy())
                expected, base = host.encode(version, bucket, room)
                found, found_base = staged.encode(version, bucket, own, place)
                assert (found_base, found.tobytes()) == (base, expected.tobytes())
    assert sum(memory.locked.values()) == (0 if refuses else sum(bucket.size_bytes for bucket in buckets))
    staged.close()
    assert not memory.locked


def test_a_device_keeps_nothing_but_what_was_sent() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Watched(DeviceDeltaEncoder):
        def _fresh(self, size_bytes: int) -> torch.Tensor:
            zeros = super()._fresh(size_bytes)
            made.append(weakref.ref(zeros))
            return zeros

    trainer = Trainer(1, torch.bfloat16)
    bucket = plan_buckets(trainer.specs, 10_000).buckets[0]
    encoder = Watched(1.0, torch.device("cpu"))
    for version in range(DeviceDeltaEncoder.whole_first + 2):
        trainer.step(0.05)
        room = encoder.room(bucket)
        trainer.fill(bucket, room.numpy())
        encoder.encode(version, bucket, room)
        del room
    kept = [zeros.numel() for found in made if (zeros := found()) is not None]
    assert sum(kept) == bucket.size_bytes


def test_an_engine_refuses_changes_of_weights_that_it_does_not_have() -> None:
    trainer = Trainer(1, torch.bfloat16)
    manifest = plan_buckets(trainer.specs, 10_000)
    bucket = manifest.buckets[0]
    encoder, images = DeltaEncoder(1.0), Images()
    first = sealed(1, *encoder.encode(1, bucket, trainer.packed(bucket))[:1])
    data, base = encoder.encode(2, bucket, trainer.packed(bucket))
    second = sealed(2, data, base=base)
    with pytest.raises(WholeNeededError, match="changes from weights v1 to v2, and this engine has none of it; send it whole"):
        images.apply(bucket, second)
    images.apply(bucket, first)
    images.apply(bucket, second)
    with pytest.raises(WeightSyncError, match="and this engine has v2 of it"):
        images.apply(bucket, second)
    with pytest.raises(WeightSyncError, match="this engine keeps no weights"):
        UpdateAssembly(manifest, 2, None).take(0, second)


def test_changed_bytes_of_a_sparse_bucket_are_found_before_they_are_applied() -> None:
    trainer = Trainer(2, torch.float32)
    manifest = plan_buckets(trainer.specs, 10_000)
    bucket = manifest.buckets[0]
    encoder, images = DeltaEncoder(1.0), Images()
    image = images.apply(bucket, sealed(1, encoder.encode(1, bucket, trainer.packed(bucket))[0]))
    assert image is not None
    before = bytes(image)
    trainer.step(0.05)
    data, base = encoder.encode(2, bucket, trainer.packed(bucket))
    parcel = sealed(2, data, base=base)
    data[-1] ^= 1
    with pytest.raises(CorruptedWeightsError):
        UpdateAssembly(manifest, 2, None, images=images).take(0, parcel)
    assert bytes(image) == before
