"""A meeting that is over: nobody joins it, and nobody forms a group with members that have gone."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.weightsync import group
from rljob_runtime.weightsync.group import C10D, Meeting, Member, Outbox, end_meeting, joined
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

    def over_when_all_are_there(member: Member, *waited: object) -> None:
        end_meeting(store, "engine-1 did not answer")

    monkeypatch.setattr(Member, "_wait", over_when_all_are_there)
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
    monkeypatch.setattr(group, "_joined", {})

    def meeting(name: str, sender: int = 0) -> Meeting:
        return Meeting(name=name, sender=sender, host="127.0.0.1", num_members=3, join_s=HANG_S, timeout_s=HANG_S)

    before, neighbor, other = joined(meeting("a"), 2, CPU), joined(meeting("a"), 1, CPU), joined(meeting("x", sender=1), 2, CPU)
    assert joined(meeting("a"), 2, CPU) is before
    after = joined(meeting("b"), 1, CPU)
    assert [seat.closed for seat in (before, neighbor, other, after)] == [True, True, False, False]  # type: ignore[attr-defined]
    assert joined(meeting("b"), 1, CPU) is after


def test_whatever_ends_the_thread_of_a_sender_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(meeting: Meeting, rank: int, device: torch.device) -> None:
        raise MemoryError("no room for the group")

    monkeypatch.setattr(group, "Member", out_of_memory)
    outbox = Outbox(Meeting(name="a", sender=3, host="127.0.0.1", num_members=2, join_s=HANG_S, timeout_s=HANG_S), CPU)
    assert outbox.room() is None
    outbox.put(torch.zeros(1, dtype=torch.uint8))
    outbox._thread.join(HANG_S)
    assert str(outbox.room()) == "trainer rank 3: MemoryError: no room for the group"
    outbox.close()
