"""Connections of a chain that break, are refused or are silent while every process lives: weights come over others, or by another way."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rljob_runtime.errors import SyncBrokenError, WeightSyncError, WorkerLostError
from rljob_runtime.weightsync import chain, meetings
from rljob_runtime.weightsync.chain import Chain
from rljob_runtime.weightsync.group import C10D
from rljob_runtime.weightsync.transports.collective import TcpTransport
from tests.support.pace import HANG_S
from tests.support.sync_setting import SHORT_S, Faulty, Setting


@pytest.fixture(scope="module", autouse=True)
def no_dns() -> Iterator[None]:
    """See ``test_sync_faults``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "attempts:0")
        yield


async def test_a_sender_that_is_stopped_does_not_hold_the_deadline_of_a_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store, in its process, does not answer; torch would wait for it."""
    stopped, let_go = threading.Event(), threading.Event()
    opened, pass_on = C10D.TCPStore, Chain.pass_on

    class Connection:
        """A member's, or the driver's."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            self._store = opened(*args, **settings)
            self.set, self.get = self._store.set, self._store.get

        def check(self, keys: list[str]) -> bool:
            if stopped.is_set():
                let_go.wait(HANG_S)
            return bool(self._store.check(keys))

    def sent(self: Chain, data: memoryview, deadline: float, look: Any) -> None:
        if self.next_rank == 1 and stopped.is_set():
            let_go.wait(HANG_S)
        pass_on(self, data, deadline, look)

    monkeypatch.setattr(C10D, "TCPStore", Connection)
    monkeypatch.setattr(Chain, "pass_on", sent)
    monkeypatch.setattr(meetings, "NOTES_TIMEOUT_S", 0.1)
    setting = Setting(TcpTransport, None)
    await setting.publish(1)
    stopped.set()
    setting.publisher.timeout_s = SHORT_S
    with pytest.raises(WeightSyncError, match=r"waited for a sender of weights \(the store of trainer rank 0 at .* did not answer within"):
        await setting.publish(2)
    assert [engine.version() for engine in setting.engines] == [1, 1]
    setting.publisher.timeout_s = HANG_S
    stopped.clear()
    let_go.set()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2
    setting.stop()


class Cut(Faulty):
    """Its connections break while it takes a bucket, and its process lives."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts = 0
        self.chains: list[Chain] = []

    def load_bucket(self, *args: Any) -> None:
        if self.cuts:
            self.cuts -= 1
            self.chains[-1].abort()
        super().load_bucket(*args)


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    """A chain whose middle is an engine that can be cut off."""
    engine = Cut()
    connect = Chain.connect

    def connected(self: Chain, *args: Any) -> None:
        connect(self, *args)
        if self.next_rank == 3:
            engine.chains.append(self)

    monkeypatch.setattr(Chain, "connect", connected)
    monkeypatch.setattr(chain, "LOST_S", 0.1)
    setting = Setting(TcpTransport, None, [Faulty(), engine, Faulty()])
    yield setting
    setting.stop()


@pytest.mark.parametrize("cuts", [1, 2])
async def test_a_connection_that_breaks_without_a_lost_engine_is_made_again_once(cut: Setting, cuts: int) -> None:
    engine = cut.engines[1]
    assert isinstance(engine, Cut)
    await cut.publish(1)
    engine.cuts = cuts
    if cuts == 1:
        assert (await cut.publish(2))["sync/resent"] == 1
        assert [cut.serves(i) for i in (0, 1, 2)] == [(2, {2})] * 3
    else:
        with pytest.raises(SyncBrokenError, match="engine-0 closed its connection with engine-1"):
            await cut.publish(2)
        assert [engine.version() for engine in cut.engines] == [1, 1, 1]
    assert len(cut.warnings) == 1
    assert cut.warnings[0].startswith("weights v2 are sent again: engine-0 closed its connection with engine-1")
    assert (await cut.publish(3))["sync/fell_back"] == 0
    assert [cut.serves(i) for i in (0, 1, 2)] == [(3, {3})] * 3
    assert cut.lost == []


async def test_a_connection_that_cannot_be_made_again_leaves_the_object_store(cut: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is blocked during a run."""
    engine = cut.engines[1]
    assert isinstance(engine, Cut)
    await cut.publish(1)
    engine.cuts = 1
    monkeypatch.setattr(chain, "connected", refused)
    measured = await cut.publish(2)
    assert (measured["sync/resent"], measured["sync/fell_back"]) == (1, 1)
    assert [cut.serves(i) for i in (0, 1, 2)] == [(2, {2})] * 3
    assert "weights go through the object store, because TCP failed its test: " in cut.warnings[-1]
    assert "Connection refused" in cut.warnings[-1]


def refused(address: tuple[str, int], wait: Any) -> socket.socket:
    """In place of a connection from one member of a chain to the next."""
    raise ConnectionRefusedError(111, f"{wait.name} does not {wait.what}: Connection refused")


async def test_a_test_that_fails_again_is_not_repeated_for_every_engine_that_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a blocked port it lasts up to a minute."""
    tries: list[str] = []

    def blocked(*args: Any) -> socket.socket:
        tries.append("connection")
        return refused(*args)

    monkeypatch.setattr(chain, "connected", blocked)
    setting = Setting(TcpTransport, None)
    assert (await setting.publish(1))["sync/fell_back"] == 1
    setting.publisher.leave_out(1, WorkerLostError("engine-1", "signal 9", ""))
    setting.replace_engine()
    assert await setting.publisher.catch_up(1)  # a group of the sender and this engine
    made = len(tries)
    assert made >= 2
    assert (await setting.publish(2))["sync/fell_back"] == 1
    assert [setting.serves(i) for i in (0, 1)] == [(2, {2})] * 2
    assert len(tries) == made
    said = r"^weights go through the object store, because TCP failed its test: .* engine-[01] does not accept a connection at 127\.0\.0\.1"
    assert re.match(said, setting.warnings[0])
    assert len(setting.warnings) == 2  # one for each test
    setting.stop()
