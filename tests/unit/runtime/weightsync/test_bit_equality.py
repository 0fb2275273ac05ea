"""Every process of every engine has the trainer's bits, by every transport, ratio of ranks to engines, size of engines and kind of sync.

What is real: transports, senders, receivers, groups (gloo), shared segments. Trainer ranks have rows of every tensor each and lie in this
process, so that a gather reads what the others have; packing over real ranks is in ``test_trainer_ranks``, ``test_lora`` and
``test_mixture_ranks``. What an engine makes of its bytes is in ``test_vllm_engine`` and ``test_sglang_engine``.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from rljob_runtime.cluster import inprocess
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.copies import Copies
from rljob_runtime.weightsync.packing import pack, plan_buckets, unpack
from rljob_runtime.weightsync.parcel import Payload, Remote, view
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import ByteArray, IncomingUpdate, TransportSettings, make_end
from rljob_runtime.weightsync.transports.collective import NcclTransport, TcpTransport
from rljob_runtime.weightsync.transports.ipc import IpcTransport
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport
from tests.support.pace import HANG_S
from tests.support.sending_ranks import SendingRank

Make = Callable[[TransportSettings], Any]
THROUGH_HOST_MEMORY: tuple[Make, ...] = (ObjectStoreTransport, SharedMemoryTransport, TcpTransport)
BETWEEN_DEVICES: tuple[Make, ...] = (NcclTransport, IpcTransport)
TRANSPORTS = (*THROUGH_HOST_MEMORY, *BETWEEN_DEVICES)
RATIOS = [(1, 1), (2, 1), (1, 2), (4, 2)]
BUCKET_BYTES = 700
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
FROZEN = "model.layers.0.self_attn.q_proj.weight"
SHAPES: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "model.embed_tokens.weight": (torch.bfloat16, (13, 16)),  # also the head: a tied one is not in the manifest
    FROZEN: (torch.bfloat16, (16, 16)),
    "model.layers.0.self_attn.k_proj.weight": (torch.bfloat16, (8, 16)),
    "model.layers.0.self_attn.q_proj.bias": (torch.bfloat16, (16,)),
    "model.layers.0.mlp.gate.weight": (torch.float32, (5, 16)),  # a router stays in float32 among others
    "model.layers.1.mlp.gate_proj.weight": (torch.float32, (11, 16)),
    "model.layers.1.mlp.up_proj.weight": (torch.float32, (11, 16)),
    "model.layers.1.self_attn.q_proj.lora_A.weight": (torch.float32, (2, 16)),
    "model.layers.1.self_attn.q_proj.lora_B.weight": (torch.float32, (16, 2)),
    "model.norm.weight": (torch.float32, (1,)),
}
MANIFEST = plan_buckets([(name, str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in SHAPES.items()], BUCKET_BYTES)


class Weights:
    """Random bits, NaNs of all kinds among them; one parameter never changes."""

    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(7)
        self.tensors = {name: self._bits(INTEGERS[dtype], shape).view(dtype) for name, (dtype, shape) in SHAPES.items()}

    def step(self, changed: float, wholly: str = "") -> None:
        """Change a part of the numbers of every parameter, and all of one."""
        for name, tensor in self.tensors.items():
            if name == FROZEN:
                continue
            bits = tensor.view(INTEGERS[tensor.dtype])
            where = torch.rand(bits.shape, generator=self._random) < (1.0 if name == wholly else changed)
            bits[where] ^= self._bits(bits.dtype, tuple(bits.shape))[where] | 1

    def _bits(self, integers: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        info = torch.iinfo(integers)
        return torch.randint(info.min, info.max, shape, generator=self._random, dtype=integers)

    def expected(self) -> dict[str, bytes]:
        return {name: bits(tensor) for name, tensor in self.tensors.items()}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(INTEGERS[tensor.dtype]).numpy().tobytes()


class Rank(SendingRank):
    """Has rows of every tensor, as unequally many as FSDP2 cuts them."""

    def __init__(self, rank: int, world_size: int, weights: Weights) -> None:
        super().__init__(rank, world_size)
        self._weights = weights

    def fill(self, bucket: Bucket, out: ByteArray) -> None:
        gathered = {}
        for slot in bucket.slots:
            whole = self._weights.tensors[slot.name]
            rows = -(-whole.shape[0] // self.world_size)
            gathered[slot.name] = torch.cat([whole[rank * rows : (rank + 1) * rows] for rank in range(self.world_size)])
        pack(bucket, gathered, out)


class Processes(FakeEngine):
    """An engine whose processes each get what they load; those of a group at the same time."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._pool = ThreadPoolExecutor(size)
        self._size = size
        self.held: list[dict[str, bytes]] = [{} for _ in range(size)]
        self.fails_at: int | None = None
        """Bucket whose load fails, once."""

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        made = make_end(receiver, **settings)
        for test in made.tests:
            self._everywhere(test)
        self._receiver = made

    def _everywhere(self, payload: Payload) -> Sequence[ByteArray]:
        """The bytes as each process gets them."""
        if isinstance(payload, Remote):
            got = self._pool.map(lambda process: payload.fetch(process, torch.device("cpu")).numpy(), range(self._size))
            return list(got)
        return [view(payload)] * self._size

    def _load(self, incoming: IncomingUpdate, deadline: float) -> None:
        for bucket, payload in incoming.receive(deadline):
            if bucket.index == self.fails_at:
                self.fails_at = None
                raise WeightSyncError("refused by the test")
            for held, data in zip(self.held, self._everywhere(payload), strict=True):
                held |= {name: bits(tensor) for name, tensor in unpack(bucket, data)}

    def shutdown(self) -> None:
        self._pool.shutdown()


@pytest.fixture(scope="module", autouse=True)
def no_dns() -> Iterator[None]:
    """See ``test_sync_faults``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "attempts:0")
        yield


def neighbors(ranks: int, engines: int, size: int) -> tuple[tuple[int | None, ...], ...]:
    """Processes of engines on devices of trainer ranks, in turn."""
    return tuple(tuple((engine * size + process) % ranks for process in range(size)) for engine in range(engines))


class Job:
    """Ranks, engines and the publisher between them."""

    def __init__(self, make: Make, ranks: int, num_engines: int, size: int, dense_above: float | None, *, while_generating: bool) -> None:
        self.weights = Weights()
        self.engines = [Processes(size) for _ in range(num_engines)]
        self._trainers = [InProcessWorker(f"trainer-{rank}", Rank(rank, ranks, self.weights)) for rank in range(ranks)]
        self._workers = [InProcessWorker(f"engine-{index}", engine) for index, engine in enumerate(self.engines)]
        self.warnings: list[str] = []
        settings = TransportSettings(
            run=f"bits{os.getpid()}",
            while_generating=while_generating,
            senders=tuple(range(ranks)),
            dense_above=dense_above,
            neighbors=neighbors(ranks, num_engines, size),
        )
        self.publisher = WeightPublisher(
            trainers=self._trainers,
            engines=self._workers,
            manifest=MANIFEST,
            transport=make(settings),
            timeout_s=HANG_S,
            probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
            while_generating=while_generating,
            warn=self.warnings.append,
        )

    async def publish(self, version: int) -> float:
        """Bytes that traveled to each engine; all processes hold the trainer's bits then."""
        report = await self.publisher.publish(version)
        traveled = (await self.publisher.measured(report))["sync/bytes"] / len(self.engines)
        self.compare()
        return traveled

    def compare(self) -> None:
        expected = self.weights.expected()
        for engine in self.engines:
            for held in engine.held:
                assert held == expected

    def replace_engine(self, index: int) -> None:
        """A new process in the place of one."""
        self.engines[index].shutdown()
        self._workers[index].target = self.engines[index] = Processes(len(self.engines[index].held))

    def stop(self) -> None:
        for worker in (*self._trainers, *self._workers):
            worker.stop()
        for engine in self.engines:
            engine.shutdown()


async def syncs(make: Make, ranks: int, num_engines: int, size: int, dense_above: float | None, *, while_generating: bool) -> list[float]:
    """Publish versions of which little, one tensor, nothing and everything changed; bytes that traveled to all engines, by version.

    Of changes between devices the first version again before that, which is whole, too.
    """
    job = Job(make, ranks, num_engines, size, dense_above, while_generating=while_generating)
    again = [(0.0, "")] if make in BETWEEN_DEVICES and dense_above is not None else []
    try:
        steps = [*again, (0.0, ""), (0.05, ""), (0.05, "model.embed_tokens.weight"), (0.0, ""), (1.0, "")]
        traveled = []
        for version, (changed, wholly) in enumerate(steps):
            job.weights.step(changed, wholly)
            traveled.append(await job.publish(version + 1))
        await job.publisher.close()
    finally:
        job.stop()
    assert job.warnings == []  # nothing went another way
    return traveled[len(again) :]


@pytest.mark.parametrize("size", [1, 2], ids=["one process", "tensor parallel 2"])
@pytest.mark.parametrize(("ranks", "engines"), RATIOS)
@pytest.mark.parametrize("make", TRANSPORTS)
def test_dense_syncs(make: Make, ranks: int, engines: int, size: int) -> None:
    for while_generating in (False, True):
        assert asyncio.run(syncs(make, ranks, engines, size, None, while_generating=while_generating)) == [MANIFEST.total_bytes] * 5


@pytest.mark.parametrize("make", [TcpTransport, NcclTransport])
def test_a_port_that_was_free_may_be_taken_before_a_sender_listens(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another job, or by another sender of this machine, as here: nothing falls back to the slow way."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(inprocess, "held_port", lambda host: other.getsockname()[1])
        assert asyncio.run(syncs(make, 2, 1, 1, None, while_generating=False)) == [MANIFEST.total_bytes] * 5


@pytest.mark.parametrize("size", [1, 2], ids=["one process", "tensor parallel 2"])
@pytest.mark.parametrize(("ranks", "engines"), RATIOS)
@pytest.mark.parametrize("make", TRANSPORTS)
def test_sparse_and_mixed_syncs(make: Make, ranks: int, engines: int, size: int) -> None:
    for while_generating in (False, True):
        first, little, mixed, nothing, all_changed = asyncio.run(syncs(make, ranks, engines, size, 0.5, while_generating=while_generating))
        embedding = next(b.size_bytes for b in MANIFEST.buckets if b.slots[0].name == "model.embed_tokens.weight")
        assert first == MANIFEST.total_bytes
        assert 0 < little < 0.3 * first
        assert embedding < mixed < embedding + 0.3 * first  # one bucket whole beside sparse ones
        assert nothing == 0
        frozen = np.prod(SHAPES[FROZEN][1]) * 2
        assert first - frozen <= all_changed <= first  # the bucket of what is frozen may be smaller


@pytest.mark.parametrize("make", BETWEEN_DEVICES)
async def test_changes_between_devices_after_a_failed_sync_and_with_a_new_engine(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are followed by two whole versions; a copy that is not of the version that changes stand on is one more reason."""
    job, whole = Job(make, 2, 2, 2, 0.5, while_generating=False), MANIFEST.total_bytes
    try:
        assert [await job.publish(version) for version in (1, 2)] == [whole, whole]
        job.weights.step(0.05)
        assert 0 < await job.publish(3) < 0.3 * whole
        job.weights.step(0.05)
        job.engines[1].fails_at = 2
        with pytest.raises(WeightSyncError, match="refused by the test"):
            await job.publish(4)
        assert [await job.publish(version) for version in (5, 6)] == [whole, whole]
        job.weights.step(0.05)
        assert 0 < await job.publish(7) < 0.3 * whole
        job.replace_engine(1)
        assert await job.publisher.catch_up(1)
        job.compare()
        for version, expected in ((8, whole), (9, whole), (10, 0)):
            assert await job.publish(version) == expected
        assert job.warnings == []
        job.weights.step(0.05)
        with monkeypatch.context() as patch:
            patch.setattr("rljob_runtime.weightsync.copies.COPIES", Copies())
            assert await job.publish(11) == whole
        assert "needs its copy of bucket 0 of weights v10, and has none; send it whole" in job.warnings[0]
        assert len(job.warnings) == 1
    finally:
        job.stop()
