"""The transport of the recipe: chosen by its name, and two versions of a model's bytes in two engines."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from rljob_api.planning.sync_routes import chosen_backend, sync_plan_of
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.validation import check
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import ByteArray, TransportSettings, make_end
from rljob_runtime.weightsync.transports import transport
from tests.unit.api.manifests import manifest

TENSORS = [(f"layers.{layer}.weight", "float32", (8, 8)) for layer in range(3)]


class Trainer:
    """A rank with bytes instead of a model; the methods are those of a policy worker."""

    rank, world_size = 0, 1

    def __init__(self) -> None:
        self.fill = 0
        self.is_silent = False

    def prepare_sender(self, sender: str, manifest: WeightManifest, settings: Mapping[str, Any]) -> None:
        self._sender = make_end(sender, self, manifest, **settings)

    def close_sender(self) -> None:
        self._sender.close()

    def send_weights(self, version: int, part: int) -> Any:
        return None if self.is_silent else self._sender.send(version, part)

    def pack_buckets(self, buckets: Mapping[int, Bucket], out: Any = None, on_packed: Any = None) -> ByteArray:
        return np.full(buckets[0].size_bytes, self.fill, np.uint8)


def publisher(trainer: Trainer, engines: list[FakeEngine], backend: SyncBackend, timeout_s: float) -> WeightPublisher:
    settings = TransportSettings(run="recipe", while_generating=False, neighbors=((0,), (0,)))
    return WeightPublisher(
        trainers=[InProcessWorker("trainer-0", trainer)],
        engines=[InProcessWorker(f"engine-{i}", engine) for i, engine in enumerate(engines)],
        manifest=plan_buckets(TENSORS, 300),
        transport=transport(backend, settings),
        timeout_s=timeout_s,
        probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
        goes_on_without=lambda engine, error: False,
    )


async def sync(backend: SyncBackend) -> None:
    trainer = Trainer()
    engines = [FakeEngine(expected={name: shape for name, _, shape in TENSORS}) for _ in range(2)]
    made = publisher(trainer, engines, backend, 30.0)
    for version in (1, 2):
        trainer.fill = 10 * version
        await made.publish(version)
        for engine in engines:
            assert engine.version() == version
            assert len(engine.received) == len(TENSORS)
            assert all(set(bytes(data)) == {trainer.fill} for _, data in engine.received)
    trainer.is_silent = True
    with pytest.raises(WeightSyncError, match="weights v3"):  # a transfer that does not end
        await publisher(trainer, engines, backend, 0.2).publish(3)


document = manifest()
document["spec"]["weightSync"] = {"backend": "Wire"}
checked = check(document)
backend = chosen_backend(checked.job.spec, checked.plan)
assert backend.value == "Wire"
assert sync_plan_of(backend, checked.plan.component("actor_train"), checked.plan.component("actor_infer")).moves_whole_tensors
asyncio.run(sync(backend))
