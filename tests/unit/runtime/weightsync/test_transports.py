"""Every transport: the trainer's bytes in engines, also where engines are lost and come back."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rljob_api.v1alpha1.operations import SyncBackend
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import DeadlineError, WeightSyncError, WorkerLostError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import ByteArray, TransportSettings
from rljob_runtime.weightsync.transports import TRANSPORTS, transport

SETTINGS = TransportSettings(run=f"recipe{os.getpid()}", while_generating=False, neighbors=((0,), (0,)))
BACKENDS = list(TRANSPORTS)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicyWorker]:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=16)).save_pretrained(folder)
    worker = PolicyWorker(PolicyConfig(model_path=str(folder)), 0, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    worker.setup("127.0.0.1", port, timeout_s=60.0)
    yield worker
    worker.shutdown()


class Setting:
    """A trainer and two engines of this process, and a publisher over them."""

    def __init__(self, trainer: PolicyWorker, backend: SyncBackend, *, timeout_s: float = 30.0) -> None:
        specs = trainer.weight_specs()
        self.manifest: WeightManifest = plan_buckets(specs, 2000)
        expected = {name: shape for name, _, shape in specs}
        self.engines = [FakeEngine(expected=expected), FakeEngine(expected=expected)]
        self.workers = [InProcessWorker(f"engine-{i}", engine) for i, engine in enumerate(self.engines)]
        self.policy = trainer
        self.trainer = InProcessWorker("trainer-0", trainer)
        self.lost: list[int] = []
        self.publisher = WeightPublisher(
            trainers=[self.trainer],
            engines=self.workers,
            manifest=self.manifest,
            transport=transport(backend, SETTINGS),
            timeout_s=timeout_s,
            probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
            goes_on_without=self._goes_on_without,
        )

    def _goes_on_without(self, engine: int, error: WorkerLostError) -> bool:
        self.lost.append(engine)
        return True

    def stop(self) -> None:
        self.policy.close_sender()
        for worker in (self.trainer, *self.workers):
            worker.stop()


def bits(received: list[tuple[Bucket, ByteArray]]) -> list[tuple[int, bytes]]:
    return [(bucket.index, bytes(data)) for bucket, data in received]


@pytest.mark.parametrize("backend", BACKENDS)
async def test_every_engine_gets_the_trainers_bytes_of_each_version(trainer: PolicyWorker, backend: SyncBackend) -> None:
    setting = Setting(trainer, backend)
    for version in (1, 2):
        with torch.no_grad():
            next(iter(trainer.model.parameters())).mul_(1.5)
        report = await setting.publisher.publish(version)
        wanted = [(bucket.index, bytes(np.asarray(trainer.pack_buckets({0: bucket})))) for bucket in setting.manifest.buckets]
        assert len(wanted) > 2
        measured = await setting.publisher.measured(report)
        assert measured["sync/bytes"] == 2 * setting.manifest.total_bytes
        assert measured["sync/stall_s"] + measured["sync/hidden_s"] == pytest.approx(report.elapsed_s)
        assert [engine.version() for engine in setting.engines] == [version, version]
        assert [bits(engine.received) for engine in setting.engines] == [wanted, wanted]
        assert measured["sync/fell_back"] == measured["sync/reloaded_fraction"] == 0
    setting.stop()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_engine_that_is_lost_is_left_out(trainer: PolicyWorker, backend: SyncBackend) -> None:
    setting = Setting(trainer, backend)
    await setting.publisher.publish(1)
    setting.publisher.leave_out(0, WorkerLostError("engine-0", "signal 9", ""))
    setting.workers[0].stop()
    await setting.publisher.publish(2)
    assert [engine.version() for engine in setting.engines] == [1, 2]
    setting.stop()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_engine_in_the_place_of_a_lost_one_catches_up_or_takes_part_in_the_next_version(
    trainer: PolicyWorker, backend: SyncBackend
) -> None:
    setting = Setting(trainer, backend)
    publisher = setting.publisher
    await publisher.publish(1)
    publisher.leave_out(0, WorkerLostError("engine-0", "signal 9", ""))
    setting.engines[0].versions[:] = [0]
    assert await publisher.catch_up(0)
    assert [engine.version() for engine in setting.engines] == [1, 1]
    assert bits(setting.engines[0].received) == bits(setting.engines[1].received)
    await publisher.publish(2)
    await publisher.retire()
    publisher.leave_out(1, WorkerLostError("engine-1", "signal 9", ""))
    assert not await publisher.catch_up(1)
    assert publisher.is_awaited
    with pytest.raises(DeadlineError, match="engine-1 waited 0 s for the next weights; none were published"):
        await publisher.arrival(1, 0.01)
    arrived = asyncio.ensure_future(publisher.arrival(1, 30.0))
    await publisher.publish(3)
    await arrived
    assert [engine.version() for engine in setting.engines] == [3, 3]
    assert not publisher.is_awaited
    await publisher.retire()
    assert not await publisher.catch_up(0)
    again = asyncio.ensure_future(publisher.arrival(0, 30.0))
    await asyncio.sleep(0)
    publisher.leave_out(0, WorkerLostError("engine-0", "signal 9", ""))
    with pytest.raises(WorkerLostError, match="engine-0"):
        await again
    setting.stop()


def test_a_backend_without_a_transport_is_named() -> None:
    with pytest.raises(WeightSyncError, match="Auto has no transport; this runtime has ObjectStore, SharedMemory, IPC, NCCL, TCP"):
        transport(SyncBackend.AUTO, SETTINGS)


def test_a_rank_without_a_transport_says_so(trainer: PolicyWorker) -> None:
    fresh = PolicyWorker(trainer.config, 0, 1)
    with pytest.raises(WeightSyncError, match="trainer rank 0 has no transport to send version 3"):
        fresh.send_weights(3, 0)
    with pytest.raises(WeightSyncError, match="no_such_module"):
        fresh.prepare_sender("no_such_module:Sender", WeightManifest(buckets=()), {})
