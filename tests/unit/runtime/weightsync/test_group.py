"""A meeting that is over: nobody joins it, and nobody forms a group with members that have gone."""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rljob_runtime.errors import DeadlineError, WeightSyncError
from rljob_runtime.weightsync import group
from rljob_runtime.weightsync import outbox as outboxes
from rljob_runtime.weightsync.group import C10D, OVER, Meeting, Member, Memberships, end_meeting
from rljob_runtime.weightsync.outbox import AHEAD, Outbox
from rljob_runtime.weightsync.transports import collective
from tests.support.pace import HANG_S

CPU = torch.device("cpu")


@pytest.fixture
def store() -> Any:
    """Where the members meet."""
    return C10D.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)


@pytest.fixture
def meeting(store: Any) -> Meeting:
    return Meeting(name=uuid.uuid4().hex, sender=0, host="127.0.0.1", port=store.port, num_members=3, join_s=HANG_S, timeout_s=HANG_S)


def test_who_comes_when_it_is_over_leaves_without_being_seen(meeting: Meeting, store: Any) -> None:
    """Otherwise the sender, which looks whether all are there before it looks whether it is over, would wait for the others."""
    end_meeting(store, "engine-1 did not answer")
    with pytest.raises(WeightSyncError, match="member 1 of 3 of the group of trainer rank 0: engine-1 did not answer"):
        Member(meeting, 1, CPU)
    assert not store.check(["here/1"])


def test_the_last_member_to_come_forms_no_group_that_another_has_given_up(
    meeting: Meeting, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after the sender came and before the last member did."""

    class Store:
        """The store; the other members come, and the meeting ends, at the moment when this member looks for them."""

        set, get = store.set, store.get

        def check(self, keys: list[str]) -> bool:
            if keys == [OVER]:
                return bool(store.check(keys))
            end_meeting(store, "engine-1 did not answer")
            return True

    monkeypatch.setattr(C10D, "TCPStore", lambda *_, **__: Store())
    with pytest.raises(WeightSyncError, match="member 0 of 3 of the group of trainer rank 0: engine-1 did not answer"):
        Member(meeting, 0, CPU)


class Seat:
    """Stands for a member."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_a_process_leaves_the_meetings_before_whatever_rank_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engine 1 is the first member behind the sender once engine 0 is lost."""
    monkeypatch.setattr(group, "Member", Seat)
    memberships = Memberships()
    joined = memberships.join

    def meeting(name: str, sender: int = 0) -> Meeting:
        return Meeting(name=name, sender=sender, host="127.0.0.1", num_members=3, join_s=HANG_S, timeout_s=HANG_S)

    before, neighbor, other = joined(meeting("a"), 2, CPU), joined(meeting("a"), 1, CPU), joined(meeting("x", sender=1), 2, CPU)
    assert joined(meeting("a"), 2, CPU) is before
    after = joined(meeting("b"), 1, CPU)
    assert [seat.closed for seat in (before, neighbor, other, after)] == [True, True, False, False]  # type: ignore[attr-defined]
    assert joined(meeting("b"), 1, CPU) is after
    memberships.leave({"a", "b"})
    assert [seat.closed for seat in (other, after)] == [False, True]  # type: ignore[attr-defined]
    assert joined(meeting("b"), 1, CPU) is not after


def test_a_receiver_without_room_for_a_bucket_ends_the_wait_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(collective, "MEMBERSHIPS", SimpleNamespace(join=lambda *seat: SimpleNamespace(give_up=said.append)))
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S)
    sent = collective.Broadcast(meeting=meeting, sequence=0, size_bytes=2**60, sent_checksum=0, what="bucket 3 of weights v1")
    with pytest.raises(WeightSyncError, match=r"bucket 3 of weights v1 has no room on cpu: .*allocate memory") as caught:
        sent.fetch(1, CPU)
    assert said == [str(caught.value)]


def test_whatever_ends_the_thread_of_a_sender_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(meeting: Meeting, rank: int, device: torch.device) -> None:
        raise MemoryError("no room for the group")

    monkeypatch.setattr(outboxes, "Member", out_of_memory)
    outbox = Outbox(Meeting(name="a", sender=3, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S), CPU)
    assert outbox.room() is None
    outbox.put(torch.zeros(1, dtype=torch.uint8))
    # with no room left, the next call waits for the thread, which ends
    faults = [outbox.room() for _ in range(AHEAD)]
    assert str(faults[-1]) == "trainer rank 3: MemoryError: no room for the group"
    outbox.close()


def test_what_gives_its_room_back_is_sent_once_a_receiver_announces_the_first_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []

    class Sending:
        """Member 0, whose receivers announce what they are asked for."""

        def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None: ...

        def await_announced(self, sequence: int) -> None:
            calls.append(("await", sequence))

        def broadcast(self, data: torch.Tensor, sequence: int) -> None:
            calls.append(("send", sequence))

        def close(self) -> None: ...

    monkeypatch.setattr(outboxes, "Member", Sending)
    outbox = Outbox(Meeting(name="a", sender=3, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S), CPU)
    put = []
    for size, spare, is_first in ((8, 0, True), (8, 8, True), (0, 8, False), (8, 0, False)):
        assert outbox.room() is None
        put.append(outbox.put(torch.zeros(size, dtype=torch.uint8), spare_bytes=spare, is_first=is_first))
    outbox.close()
    assert put == [(0, None), (1, 1), (2, 1), (3, None)]
    assert calls == [("send", 0), ("await", 1), ("send", 1), ("await", 1), ("send", 2), ("send", 3)]


def test_the_sender_waits_for_the_announcement_of_a_receiver_until_the_deadline(
    meeting: Meeting, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = replace(meeting, num_members=2)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(Member, pair, 1, CPU)
        sender, receiver = Member(pair, 0, CPU), coming.result(HANG_S)
    receiver.announce(3)
    sender.await_announced(3)
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(group, "time", clock)
        with pytest.raises(DeadlineError, match=r"member 0 of 2 .*: no engine was there to take broadcast 4 in time"):
            sender.await_announced(4)
    assert HANG_S < clock.now_s <= HANG_S + 2 * Clock.STEP_S
    end_meeting(store, "engine-1 is lost")
    with pytest.raises(WeightSyncError, match="engine-1 is lost"):
        sender.await_announced(4)
    for member in (sender, receiver):
        member.close()


def test_a_group_of_nccl_has_no_watchdog_which_would_end_the_process_after_the_loss_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, int, int, timedelta, dict[str, str | None]]] = []
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT")

    class Nccl:
        """As torch's, which reads these variables when it is made."""

        Options = SimpleNamespace

        def __init__(self, store: Any, rank: int, size: int, options: SimpleNamespace) -> None:
            made.append((store, rank, size, options._timeout, {name: os.environ.get(name) for name in names}))

    monkeypatch.setattr(C10D, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.delenv(names[0], raising=False)
    monkeypatch.setenv(names[1], "0")
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", num_members=3, join_s=HANG_S, timeout_s=HANG_S)
    group.process_group("store", 2, meeting, torch.device("cuda", 0), HANG_S)
    assert made == [("store", 2, 3, timedelta(seconds=HANG_S), dict(zip(names, ("0", "1"), strict=True)))]
    assert [os.environ.get(name) for name in names] == [None, "0"]


def test_the_memory_of_a_broadcast_that_broke_off_is_kept_until_the_group_is_aborted(
    meeting: Meeting, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of NCCL may write to it until then."""
    let_go, aborted = threading.Event(), threading.Event()
    kept: list[bool] = []

    class Call:
        def is_completed(self) -> bool:
            return False

    class Group:
        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Call:
            return Call()

        def abort(self) -> None:
            let_go.wait(HANG_S)
            kept.append(memory() is not None)
            aborted.set()

    monkeypatch.setattr(group, "process_group", lambda *arguments: Group())
    for other in (0, 2):
        store.set(f"here/{other}", "")
    member = Member(meeting, 1, CPU)
    data = torch.zeros(8, dtype=torch.uint8)
    memory = weakref.ref(data)
    end_meeting(store, "engine-1 did not answer")
    with pytest.raises(WeightSyncError, match="engine-1 did not answer"):
        member.broadcast(data, 0)
    del data
    let_go.set()
    assert aborted.wait(HANG_S)
    assert kept == [True]


@pytest.mark.parametrize(
    ("join_s", "fault", "expected", "said"),
    [
        (2.0, None, DeadlineError, "member 1 of 2 of the group of trainer rank 0: NCCL did not connect the members in time"),
        (
            HANG_S,
            RuntimeError("NCCL error: no route to host"),
            WeightSyncError,
            "group could not be formed: NCCL error: no route to host",
        ),
    ],
)
def test_members_that_nccl_cannot_connect_get_that_error(
    store: Any, monkeypatch: pytest.MonkeyPatch, join_s: float, fault: Exception | None, expected: type[Exception], said: str
) -> None:
    """Weights then go another way; NCCL itself waits for them without end."""
    let_go, aborted = threading.Event(), threading.Event()

    class Group:
        def eager_connect_single_device(self, device: torch.device) -> None:
            if fault is not None:
                raise fault
            let_go.wait(HANG_S)

        def abort(self) -> None:
            aborted.set()

    monkeypatch.setattr(group, "process_group", lambda *arguments: Group())
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    store.set("here/0", "")
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", port=store.port, num_members=2, join_s=join_s, timeout_s=HANG_S)
    with pytest.raises(expected, match=said):
        Member(meeting, 1, torch.device("cuda", 0))
    assert aborted.wait(HANG_S)
    let_go.set()


class Clock:
    """In place of the module ``time``: only pauses take time, and each takes :data:`STEP_S`."""

    STEP_S = 1.0

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += self.STEP_S


@pytest.mark.parametrize(("rank", "limit_s"), [(0, 500.0), (1, 50.0)])
def test_a_sender_has_the_time_of_a_sync_for_engines_that_come_to_other_senders_first(
    store: Any, monkeypatch: pytest.MonkeyPatch, rank: int, limit_s: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(group, "time", clock)
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", port=store.port, num_members=2, join_s=50.0, timeout_s=500.0)
    with pytest.raises(DeadlineError, match="did not come"):
        Member(meeting, rank, CPU)
    assert limit_s < clock.now_s <= limit_s + 2 * Clock.STEP_S


@pytest.mark.parametrize("rank", [0, 1])
def test_who_has_met_has_the_time_of_joining_to_connect(store: Any, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """The sender does not spend the time of a whole sync on members that are there and cannot be reached."""
    found: list[float] = []
    monkeypatch.setattr(group, "process_group", lambda *arguments: found.append(arguments[-1]))
    monkeypatch.setattr(group, "time", Clock())
    store.set(f"here/{1 - rank}", "")
    meeting = Meeting(name="a", sender=0, host="127.0.0.1", port=store.port, num_members=2, join_s=50.0, timeout_s=500.0)
    Member(meeting, rank, CPU)
    assert found == [50.0]
