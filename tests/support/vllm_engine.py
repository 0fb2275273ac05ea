"""A real vLLM engine in the process of the test, in the environment that its worker would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.delta import DeltaEncoder
from rljob_runtime.weightsync.packing import pack
from rljob_runtime.weightsync.parcel import sealed
from rljob_runtime.weightsync.transport import Shapes
from rljob_runtime.weightsync.transports.object_store import PackedReceiver
from tests.support.engine_contract import TIMEOUT_S, manifest_of, packed

PACKED_RECEIVER = "rljob_runtime.weightsync.transports.object_store:PackedReceiver"


class WatchedReceiver(PackedReceiver):
    """Shows the updates that it begins."""

    begun: ClassVar[list[UpdateAssembly]] = []

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """As an engine's end does."""
        self.begun[:] = [super().begin(manifest, version, expected)]
        return self.begun[0]


class Sparse:
    """Updates of which only the numbers that changed travel."""

    def __init__(self, engine: VllmEngine) -> None:
        """Both ends, so that the next update is whole."""
        engine.prepare_receiver(f"{__name__}:{WatchedReceiver.__name__}", {"sparse": True})
        self._engine = engine
        self._encoder = DeltaEncoder(0.4)

    def push(self, tensors: dict[str, torch.Tensor], version: int) -> list[bool]:
        """Which buckets were sparse."""
        manifest, sparse = manifest_of(tensors), []
        self._engine.begin_update(manifest, version)
        for bucket in manifest.buckets:
            room = self._encoder.room(bucket)
            pack(bucket, tensors, room)
            data, base = self._encoder.encode(version, bucket, room)
            self._engine.load_bucket(bucket.index, sealed(version, data, base=base))
            sparse.append(base is not None)
        assert self._engine.finish_update(TIMEOUT_S) == version
        return sparse

    def copied_bytes(self) -> int:
        """What the engine keeps beside its parameters."""
        images = WatchedReceiver.begun[0].images
        assert images is not None
        return images.size_bytes


def push_whole(engine: VllmEngine, tensors: dict[str, torch.Tensor]) -> None:
    """A whole update that no sparse one can follow."""
    engine.prepare_receiver(PACKED_RECEIVER, {})
    manifest, version = manifest_of(tensors), engine.version() + 1
    engine.begin_update(manifest, version)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, packed(bucket, tensors))
    assert engine.finish_update(TIMEOUT_S) == version


@contextmanager
def running(config: EngineConfig) -> Iterator[VllmEngine]:
    """The engine until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT_TO_UNSET:
            patch.delenv(name, raising=False)
        for name, value in engine_environment(config).items():
            patch.setenv(name, value)
        engine = VllmEngine(config)
        yield engine
        engine.shutdown()
