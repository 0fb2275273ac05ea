"""Changes that travel between devices wait on their senders until all are found."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from rljob_runtime.errors import EngineLostError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.group import Member
from rljob_runtime.weightsync.transport import ByteArray
from rljob_runtime.weightsync.transports.collective import NcclTransport
from tests.support.sync_setting import MANIFEST, Faulty, Setting, Trainer


@pytest.fixture(scope="module", autouse=True)
def no_dns() -> Iterator[None]:
    """As in ``test_sync_faults``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "attempts:0")
        yield


class Logged(Faulty):
    """Logs the buckets that it takes, and counts its ends of a transport."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.prepared = 0

    def prepare_receiver(self, *args: Any) -> None:
        self.prepared += 1
        super().prepare_receiver(*args)

    def load_bucket(self, *args: Any) -> None:
        self.log.append("load")
        super().load_bucket(*args)


@pytest.mark.parametrize("engines", [1, 2])
async def test_an_engine_that_receives_on_its_device_begins_once_all_changes_are_packed(
    engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If senders can hold them; buckets that come whole, or are too many, go on their way at once."""
    log: list[str] = []
    setting = Setting(NcclTransport, 0.5, [Logged(log) for _ in range(engines)])
    changed = 0
    begun: list[int] = []
    broadcast = Member.broadcast

    def sent(member: Member, data: torch.Tensor, sequence: int) -> None:
        if threading.current_thread().name == "rljob-group-0":
            begun.append(log.count("pack"))
        broadcast(member, data, sequence)

    def send_weights(version: int, part: int) -> Any:
        if version > 0:
            log.append("pack")
        return Trainer.send_weights(setting.trainer, version, part)

    def fill(bucket: Bucket, out: ByteArray) -> None:
        numbers = out.view(np.float32)
        numbers[:] = 7.0
        numbers[:changed] = setting.trainer.value

    monkeypatch.setattr(Member, "broadcast", sent)
    monkeypatch.setattr(setting.trainer, "send_weights", send_weights)
    monkeypatch.setattr(setting.trainer, "fill", fill)
    parts, loads = len(MANIFEST.buckets), engines * ["load"]

    async def logged(version: int, numbers: int) -> list[str]:
        nonlocal changed
        changed = numbers
        log.clear()
        begun.clear()
        await setting.publish(version)
        assert setting.warnings == []
        for index in range(engines):
            found = np.concatenate([np.asarray(data).view(np.float32) for _, data in setting.engines[index].received])
            assert sorted(set(found.tolist())) == sorted({7.0, float(version)} if numbers else {7.0})
        return list(log)

    once_all_are_packed = [*(parts * ["pack"]), *(parts * loads)]
    for version in (1, 2):  # whole: what is packed and what is loaded at the same time come in any order
        found = await logged(version, 2)
        assert sorted(found) == sorted(once_all_are_packed)
        assert found.index("load") <= 2
    assert await logged(3, 2) == once_all_are_packed
    assert begun == [parts] * parts  # a broadcast that nobody takes would keep the device from what packing may wait for
    for version, numbers in ((4, 20), (5, 0)):  # 160 bytes of each bucket, and room for 200
        found = await logged(version, numbers)
        assert sorted(found) == sorted(once_all_are_packed)
        assert 2 <= found.index("load") <= 3
    assert await logged(6, 2) == once_all_are_packed
    setting.stop()


async def test_an_engine_that_is_lost_while_changes_wait_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As somebody else finds out: the others begin again without it."""
    left = Logged([])
    setting = Setting(NcclTransport, 0.5, [Faulty(), left])

    def fill(bucket: Bucket, out: ByteArray) -> None:
        numbers = out.view(np.float32)
        numbers[:] = 7.0
        numbers[0] = setting.trainer.value

    def send_weights(version: int, part: int) -> Any:
        if version == 3 and part == len(MANIFEST.buckets) - 1:
            setting.publisher.leave_out(0, EngineLostError("engine-0", "signal 9", "no log"))
        return Trainer.send_weights(setting.trainer, version, part)

    monkeypatch.setattr(setting.trainer, "fill", fill)
    monkeypatch.setattr(setting.trainer, "send_weights", send_weights)
    for version in (1, 2):
        await setting.publish(version)
    before = left.prepared
    await setting.publish(3)
    assert left.prepared == before + 1
    assert setting.engines[1].version() == 3
    assert setting.warnings == []
    setting.stop()
