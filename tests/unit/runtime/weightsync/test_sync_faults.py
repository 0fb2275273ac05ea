"""A sync in which something breaks: an error that names it, or a repetition; either way the next sync puts all engines right."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.errors import CorruptedWeightsError, DeadlineError, WeightSyncError, WorkerLostError
from rljob_runtime.weightsync import group
from rljob_runtime.weightsync.copies import COPIES
from rljob_runtime.weightsync.group import MEMBERSHIPS, Memberships
from rljob_runtime.weightsync.node_shares import NodeShare
from rljob_runtime.weightsync.parcel import Digest
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.shared_memory import FOLDER, prefix_of
from rljob_runtime.weightsync.transport import SyncLink, TransportSettings
from rljob_runtime.weightsync.transports import collective
from rljob_runtime.weightsync.transports.collective import HOST, Broadcast, NcclTransport, TcpTransport
from rljob_runtime.weightsync.transports.ipc import IpcTransport
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport
from tests.support.pace import HANG_S
from tests.support.sync_setting import MANIFEST, SHORT_S, Faulty, Setting, Trainer, corrupted


def shared_tcp(settings: TransportSettings) -> TcpTransport:
    """All engines are on one node, which has one copy: the first engine receives, the others read."""
    return TcpTransport(replace(settings, engine_nodes=(1,) * len(settings.neighbors)))


TRANSPORTS: list[Callable[[TransportSettings], Any]] = [
    ObjectStoreTransport,
    SharedMemoryTransport,
    TcpTransport,
    shared_tcp,
    NcclTransport,
    IpcTransport,
]
CALLS = ["prepare_receiver", "begin_update", "load_bucket", "finish_update", "score"]
"""Of an engine, by phase: prepare, receive (before, while and after buckets come), probe."""
SENDER_CALLS = ["prepare_sender", "send_weights", "compute_logprobs"]
"""Of a trainer rank: prepare, send, probe."""


WAYS = [(make, dense) for make in TRANSPORTS for dense in (None, 1.0) if make is not shared_tcp or dense]


@pytest.fixture(scope="module", autouse=True)
def no_dns() -> Iterator[None]:
    """Torch asks for the name of 127.0.0.1 at each connection to a store: 5 s where no DNS server answers. Without effect, but for
    the time, where this process has used the resolver before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RES_OPTIONS", "attempts:0")
        yield


@pytest.fixture(params=WAYS, ids=lambda p: f"{p[0].__name__}-{p[1]}")
def setting(request: pytest.FixtureRequest) -> Any:
    made = Setting(*request.param)
    yield made
    made.stop()


@pytest.mark.parametrize("method", CALLS)
async def test_an_engine_killed_in_any_phase_is_left_out_and_comes_back_with_all_weights(setting: Setting, method: str) -> None:
    setting.engines[1].faults.dies_in = method
    setting.engines[1].faults.passes = 0 if method == "prepare_receiver" else 1
    await setting.publish(1)
    if not setting.lost:  # load_bucket is made several times a sync, the others once
        await setting.publish(2)
    assert setting.lost == [1]
    version = setting.engines[0].version()
    assert setting.serves(0) == (version, {version})
    setting.replace_engine()
    assert await setting.publisher.catch_up(1)
    assert setting.serves(1) == (version, {version})
    await setting.publish(version + 1)
    assert [setting.serves(i) for i in (0, 1)] == [(version + 1, {version + 1})] * 2
    assert setting.warnings == []  # no other transport took its place


@pytest.mark.parametrize("method", SENDER_CALLS)
async def test_a_trainer_killed_in_any_phase_is_named_and_the_next_one_sends_all(setting: Setting, method: str) -> None:
    """Buckets before the third have been sent; engines answer with one version, and hold all of the next."""
    if method == "prepare_sender":
        setting.trainer.faults.dies_in = method
    else:
        await setting.publish(1)
        setting.trainer.faults.dies_in, setting.trainer.faults.passes = method, 2 if method == "send_weights" else 0
    with pytest.raises(WorkerLostError, match="trainer-0"):
        await setting.publish(2)
    served = {"prepare_sender": 0, "send_weights": 1, "compute_logprobs": 2}[method]
    assert [engine.version() for engine in setting.engines] == [served] * 2
    assert setting.lost == []
    setting.replace_trainer()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def timed_out(setting: Setting, version: int) -> str:
    """What the error of an update says whose deadline the trainer's ranks have met: on a busy machine the first one may be too short."""
    said = ""
    for longer in (1, 8, 64):
        setting.publisher.timeout_s = SHORT_S * longer
        with pytest.raises(WeightSyncError) as caught:
            await setting.publish(version)
        said = str(caught.value)
        if "the trainer's ranks" not in said:
            break
    return said


@pytest.mark.parametrize("method", CALLS[:-1])
async def test_an_engine_that_does_not_answer_in_time_is_named_and_takes_the_next_sync(setting: Setting, method: str) -> None:
    if method != "prepare_receiver":
        await setting.publish(1)
    faults = setting.engines[1].faults
    faults.hangs_in = method
    said = await timed_out(setting, 2)
    assert re.search(r"spec\.weightSync\.timeoutSeconds\); it waited for .*engine-1", said), said
    assert setting.engines[1].version() < 2
    setting.publisher.timeout_s, faults.hangs_in = HANG_S, None
    faults.let_go.set()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def test_a_corrupted_bucket_is_sent_again(setting: Setting) -> None:
    assert (await setting.publish(1))["sync/resent"] == 0
    setting.trainer.corrupts = 1
    assert (await setting.publish(2))["sync/resent"] == 1
    assert [setting.serves(i) for i in (0, 1)] == [(2, {2})] * 2
    assert len(setting.warnings) == 1
    assert setting.warnings[0].startswith("weights v2 are sent again: bucket 2 of ")
    assert (await setting.publish(3))["sync/resent"] == 0
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def test_each_end_computes_the_checksum_of_a_bucket_once(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    await setting.publish(1)
    counted: list[int] = []
    finished = Digest.finished

    def counting(digest: Digest) -> int:
        counted.append(finished(digest))
        return counted[-1]

    with monkeypatch.context() as patch:
        patch.setattr(Digest, "finished", counting)
        await setting.publish(2)
    assert len(counted) == len(MANIFEST.buckets) * (1 + len(setting.engines))


async def test_a_bucket_that_stays_corrupted_is_an_error_and_the_next_sync_is_whole(setting: Setting) -> None:
    await setting.publish(1)
    setting.trainer.corrupts = 2
    with pytest.raises(CorruptedWeightsError, match="its bytes changed on the way"):
        await setting.publish(2)
    assert [engine.version() for engine in setting.engines] == [1, 1]
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


async def test_a_trainer_that_fails_half_way_leaves_engines_that_take_the_next_sync(setting: Setting) -> None:
    await setting.publish(1)
    setting.trainer.fails = 1
    with pytest.raises(WeightSyncError, match="bucket 3 does not fit the trainer's model"):
        await setting.publish(2)
    assert [engine.version() for engine in setting.engines] == [1, 1]
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1)] == [(3, {3})] * 2


@pytest.mark.parametrize(
    "error", [TimeoutError("the user's own lock"), DeadlineError("bucket 2 did not end in time")], ids=["plain", "own"]
)
async def test_a_timeout_of_the_transport_is_not_reported_as_the_deadline_of_the_sync(error: TimeoutError) -> None:
    class Late(ObjectStoreTransport):
        async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
            raise error

    setting = Setting(Late, None)
    with pytest.raises(TimeoutError) as found:
        await setting.publish(1)
    assert found.value is error
    setting.stop()


class Killed(Faulty):
    """Its process ends while it takes a bucket: its connections close before the driver hears of it."""

    def load_bucket(self, *args: Any) -> None:
        _, parcel = args
        if self.faults.dies_in == "load_bucket" and not self.faults.passes:
            rank_of_the_second = 2
            MEMBERSHIPS.join(parcel.payload.meeting, rank_of_the_second, HOST).close()
        super().load_bucket(*args)


@pytest.mark.parametrize("dense_above", [None, 1.0], ids=["dense", "sparse"])
async def test_the_loss_of_the_middle_of_a_chain_closes_it_around_the_gap(dense_above: float | None) -> None:
    """In the same sync, and in the next ones; the place is filled again by an engine that joins."""
    setting = Setting(TcpTransport, dense_above, [Faulty(), Killed(), Faulty()])
    await setting.publish(1)
    setting.engines[1].faults.dies_in, setting.engines[1].faults.passes = "load_bucket", 2
    for version in (2, 3):
        await setting.publish(version)
        assert setting.lost == [1]
        assert [setting.serves(i) for i in (0, 2)] == [(version, {version})] * 2
    setting.replace_engine()
    assert await setting.publisher.catch_up(1)
    await setting.publish(4)
    assert [setting.serves(i) for i in (0, 1, 2)] == [(4, {4})] * 3
    assert setting.warnings == []
    setting.stop()


def node_segments() -> dict[str, int]:
    """Bytes of the shared memory of this test's run, by node and bucket."""
    found = FOLDER.glob(f"{prefix_of(f'faults{os.getpid()}')}node*")
    return {f"{path.name.split('-')[2]} {path.name.split('-')[-1]}": path.stat().st_size for path in found}


class Watched(Faulty):
    """Knows the members of the chain that it was in, and when it was prepared."""

    def __init__(self, prepared: list[tuple[Any, str]]) -> None:
        """``prepared``: of all engines."""
        super().__init__()
        self.prepared = prepared

    def prepare_receiver(self, receiver: str, *args: Any) -> None:
        self.prepared.append((self, receiver.partition(":")[2]))
        super().prepare_receiver(receiver, *args)

    def load_bucket(self, *args: Any) -> None:
        self.chain = args[1].payload.meeting.chain
        super().load_bucket(*args)


async def test_engines_of_a_node_have_one_copy_of_an_update_together() -> None:
    """Of two nodes, one with two engines; with the loss of an engine each is the only one of its node."""

    def transport(settings: TransportSettings) -> TcpTransport:
        return TcpTransport(replace(settings, engine_nodes=(3, 5, 3)))

    prepared: list[tuple[Any, str]] = []
    first, alone, second = engines = [Watched(prepared), Watched(prepared), Watched(prepared)]
    setting = Setting(transport, None, engines)
    for version in (1, 2):
        measured = await setting.publish(version)
        assert measured["sync/bytes"] == 3 * MANIFEST.total_bytes
        assert [setting.serves(i) for i in (0, 1, 2)] == [(version, {version})] * 3
        assert {engine.chain for engine in engines} == {("trainer rank 0", "engine-0", "engine-1")}
        assert node_segments() == {f"node3 {bucket.index}": bucket.size_bytes for bucket in MANIFEST.buckets}
    assert set(prepared[:2]) == {(first, "PackedReceiver"), (second, "PackedReceiver")}  # nobody maps an older copy
    assert set(prepared[2:4]) == {(first, "BroadcastReceiver"), (alone, "BroadcastReceiver")}
    assert prepared[4:] == [(second, "BroadcastReceiver")]
    setting.engines[0].faults.dies_in = "begin_update"
    await setting.publish(3)
    assert [setting.serves(i) for i in (1, 2)] == [(3, {3})] * 2
    assert second.chain == ("trainer rank 0", "engine-2", "engine-1")
    assert node_segments() == {}
    setting.engines[0] = setting.workers[0].target = Watched(prepared)
    assert await setting.publisher.catch_up(0)
    await setting.publish(4)
    assert [setting.serves(i) for i in (0, 1, 2)] == [(4, {4})] * 3
    assert len(node_segments()) == len(MANIFEST.buckets)
    assert setting.warnings == []
    setting.stop()
    assert node_segments() == {}


@pytest.mark.parametrize("method", CALLS)
async def test_readers_go_on_with_another_engine_that_receives(method: str) -> None:
    setting = Setting(shared_tcp, None, [Faulty(), Faulty(), Faulty()])
    setting.engines[0].faults.dies_in = method
    setting.engines[0].faults.passes = 0 if method == "prepare_receiver" else 2
    for version in (1, 2, 3, 4):
        await setting.publish(version)
    assert setting.lost == [0]
    assert [setting.serves(i) for i in (1, 2)] == [(4, {4})] * 2
    assert setting.warnings == []
    setting.stop()
    assert node_segments() == {}


async def test_a_node_without_room_for_its_copy_gets_weights_through_the_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, first: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    setting = Setting(shared_tcp, None)
    assert (await setting.publish(1))["sync/fell_back"] == 1
    assert [setting.serves(i) for i in (0, 1)] == [(1, {1})] * 2
    (warning,) = setting.warnings
    assert f"{MANIFEST.total_bytes} bytes of shared memory ({len(MANIFEST.buckets)} segments) cannot be had" in warning
    assert "raise nodeGroups[].resources.sharedMemory" in warning
    assert node_segments() == {}
    setting.stop()


async def test_the_deadline_of_a_chain_names_the_engine_that_keeps_the_others_waiting() -> None:
    """Of three whose calls have not come back."""
    setting = Setting(TcpTransport, None, [Faulty(), Faulty(), Faulty()])
    await setting.publish(1)
    setting.engines[1].faults.hangs_in = "load_bucket"
    setting.publisher.timeout_s = SHORT_S
    with pytest.raises(WeightSyncError, match=r"it waited for engine-1 to send 200 more of 200 bytes$"):
        await setting.publish(2)
    setting.publisher.timeout_s, setting.engines[1].faults.hangs_in = HANG_S, None
    setting.engines[1].faults.let_go.set()
    await setting.publish(3)
    assert [setting.serves(i) for i in (0, 1, 2)] == [(3, {3})] * 3
    setting.stop()


async def test_sparse_syncs_report_the_bytes_that_traveled() -> None:
    setting = Setting(ObjectStoreTransport, 1.0)
    whole = 2.0 * MANIFEST.total_bytes
    assert (await setting.publish(1))["sync/bytes"] == whole
    assert (await setting.publish(2))["sync/bytes"] == whole  # every number changed
    assert (await setting.publish(2))["sync/bytes"] == 0
    setting.stop()


@pytest.mark.parametrize("make", [shared_tcp, NcclTransport])
async def test_a_test_that_fails_leaves_no_memory_of_a_node_and_no_group(
    make: Callable[[TransportSettings], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[Any] = []
    join = Memberships.join

    def watched(memberships: Memberships, *seat: Any) -> Any:
        joined.append(join(memberships, *seat))
        return joined[-1]

    setting = Setting(make, 1.0)
    monkeypatch.setattr(Memberships, "join", watched)

    def send_weights(version: int, part: int) -> Any:
        sent = Trainer.send_weights(setting.trainer, version, part)
        return corrupted(sent) if version < 0 and isinstance(sent.payload, Broadcast) else sent

    monkeypatch.setattr(setting.trainer, "send_weights", send_weights)
    left = Memberships.leave
    names: set[str] = set()

    def leave(memberships: Memberships, meetings: Any) -> None:
        names.update(meetings)
        left(memberships, meetings)

    monkeypatch.setattr(Memberships, "leave", leave)
    await setting.publish(1)
    assert "failed its test" in setting.warnings[0]
    assert node_segments() == {}
    assert joined
    assert len(names) == 1
    assert [setting.serves(i) for i in (0, 1)] == [(1, {1})] * 2
    setting.stop()


async def test_engines_of_a_chain_join_before_they_make_the_copy_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other members wait for them no longer than for the test of a transport, which memory for a large model may exceed."""

    def transport(settings: TransportSettings) -> TcpTransport:
        return TcpTransport(replace(settings, engine_nodes=(3, 5, 3)))

    logs: dict[int, list[str]] = {}
    join, segments = Memberships.join, NodeShare.segments

    def joined(memberships: Memberships, *seat: Any) -> Any:
        logs.setdefault(threading.get_ident(), []).append("join")
        return join(memberships, *seat)

    def made(share: NodeShare) -> Any:
        logs.setdefault(threading.get_ident(), []).append("memory")
        return segments(share)

    monkeypatch.setattr(Memberships, "join", joined)
    monkeypatch.setattr(NodeShare, "segments", made)
    setting = Setting(transport, None, [Faulty(), Faulty(), Faulty()])
    await setting.publish(1)
    assert [log[:2] for log in logs.values()] == [["join", "memory"]] * 2
    assert [setting.serves(i) for i in (0, 1, 2)] == [(1, {1})] * 3
    setting.stop()


async def test_two_senders_send_along_chains_in_which_one_node_has_two_engines_and_another_one() -> None:
    """The chain of rank 0 goes from node 0 to node 1, that of rank 1 the other way; no engine waits for one that waits for it."""
    ranks, engines, warnings = [Trainer(7, rank) for rank in (0, 1)], [FakeEngine() for _ in range(3)], list[str]()
    workers = [InProcessWorker(f"engine-{index}", engine) for index, engine in enumerate(engines)]
    trainers = [InProcessWorker(f"trainer-{rank.rank}", rank) for rank in ranks]
    settings = TransportSettings(
        run=f"faults{os.getpid()}", while_generating=False, senders=(0, 1), engine_nodes=(0, 1, 0), sender_nodes={0: 0, 1: 1}
    )
    publisher = WeightPublisher(
        trainers=trainers,
        engines=workers,
        manifest=MANIFEST,
        transport=TcpTransport(settings),
        timeout_s=HANG_S,
        probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
        warn=warnings.append,
    )
    await publisher.publish(1)
    assert warnings == []
    for engine in engines:
        assert {int(byte) for bucket, data in engine.received for byte in data[: bucket.slots[0].size_bytes]} == {7}
        engine.shutdown()
    await publisher.close()
    for worker in (*workers, *trainers):
        worker.stop()


class Refusing(Faulty):
    """Takes weights through the object store alone."""

    refuses = False

    def prepare_receiver(self, receiver: str, *args: Any) -> None:
        if self.refuses and not receiver.endswith(":PackedReceiver"):
            raise WeightSyncError("refused by the test")
        super().prepare_receiver(receiver, *args)


@pytest.mark.parametrize("make", [NcclTransport, IpcTransport])
async def test_engines_free_their_copies_once_weights_go_through_the_object_store(
    make: Callable[[TransportSettings], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And leave the groups, which have buffers on devices."""
    joined = Memberships()
    monkeypatch.setattr(group, "MEMBERSHIPS", joined)
    monkeypatch.setattr(collective, "MEMBERSHIPS", joined)
    left: set[str] = set()
    monkeypatch.setattr(joined, "leave", left.update)
    refusing = Refusing()
    setting = Setting(make, 1.0, [Faulty(), refusing])
    owners = [f"engine {index} of faults{os.getpid()}" for index in (0, 1)]
    await setting.publish(1)
    assert [COPIES.size_bytes(owner) for owner in owners] == [MANIFEST.total_bytes] * 2

    refusing.refuses = True
    setting.publisher.join(1)  # both ends are made again
    assert (await setting.publish(2))["sync/fell_back"] == 1
    assert [COPIES.size_bytes(owner) for owner in owners] == [0, 0]
    assert bool(left) == (make is NcclTransport)
    assert [setting.serves(i) for i in (0, 1)] == [(2, {2})] * 2
    setting.stop()
