"""The calls of one version through the object store: few where little travels."""

from __future__ import annotations

import asyncio

import pytest

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.transport import SyncLink, TransportSettings
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from tests.support.fake_workers import CountingTrainer, ServingEngine

TENSORS = [("a.weight", "float32", (4,)), ("b.weight", "float32", (32,))]


class Recording(ServingEngine):
    def __init__(self, name: str, dies_in: str | None = None) -> None:
        super().__init__(name)
        self.calls: list[str] = []
        self._dies_in = dies_in

    def start(self, method: str, *args):  # type: ignore[no-untyped-def]
        self.calls.append(method)
        return super().start("die" if method == self._dies_in else method, *args)

    def die(self, *args: object) -> None:
        raise WorkerLostError(self.name, "signal 9", self.log_file)


def sync(engines: list[Recording], bucket_bytes: int, survives: bool = False) -> dict[int, int]:
    link = SyncLink(
        trainers=[CountingTrainer()],
        engines=engines,
        manifest=plan_buckets(TENSORS, bucket_bytes),
        timeout_s=5.0,
        on_running="recompute",
        goes_on_without=lambda engine, error: survives,
    )

    async def run() -> dict[int, int]:
        transport = ObjectStoreTransport(TransportSettings(run="test", while_generating=False))
        await transport.prepare(link)
        return await transport.transfer(7, link)

    return asyncio.run(run())


def test_what_fits_one_bucket_is_one_call_of_each_engine() -> None:
    engines = [Recording("engine-0"), Recording("engine-1")]
    assert sync(engines, 1024) == {0: 7, 1: 7}
    assert [engine.calls for engine in engines] == [["prepare_receiver", "update"]] * 2
    assert engines[0].phases == ["begin v7", "bucket 0", "finish"]


def test_more_buckets_travel_while_the_next_is_packed() -> None:
    engine = Recording("engine-0")
    assert sync([engine], 64) == {0: 7}
    assert engine.calls == ["prepare_receiver", "begin_update", "load_bucket", "load_bucket", "finish_update"]


def test_an_engine_lost_in_its_one_call_is_left_out_or_an_error() -> None:
    assert sync([Recording("engine-0"), Recording("engine-1", dies_in="update")], 1024, survives=True) == {0: 7}
    with pytest.raises(WorkerLostError, match="engine-1"):
        sync([Recording("engine-0"), Recording("engine-1", dies_in="update")], 1024)
