"""The election: who may write, and until when, with clocks that the test controls."""

import pytest

from rljob_operator.errors import UnavailableError
from rljob_operator.kube import LEASE_TIMEOUT_S
from rljob_operator.lease import HOLD_S, LEASE_S, RENEW_S, Election, Leadership
from rljob_operator.protocol import Kind
from tests.unit.operator.shell.fake_kube import FakeKube


class Candidate:
    """One operator with its own clock, whose zero means nothing."""

    def __init__(self, kube: FakeKube, name: str, zero_s: float) -> None:
        self.now_s = zero_s
        self.leadership = Leadership(lambda: self.now_s)
        self.election = Election(kube, self.leadership, lease="system/op", identity=name, jitter=lambda: 0.0)

    async def step(self) -> None:
        """One look, which may take its time, and the pause after it."""
        pause_s = await self.election.step()
        self.now_s += pause_s

    async def wait(self, seconds: float) -> None:
        """Time passes while it looks at the lease as often as it does in production."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            await self.step()
        await self.election.step()

    def leads(self) -> bool:
        return self.leadership.holds()


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def first(kube: FakeKube) -> Candidate:
    return Candidate(kube, "first", 1000.0)


@pytest.fixture
def second(kube: FakeKube) -> Candidate:
    return Candidate(kube, "second", 5.0)


def holder(kube: FakeKube) -> str | None:
    return kube.one(Kind.LEASE, "op", "system")["spec"].get("holderIdentity")


async def test_the_first_takes_a_lease_that_does_not_exist_and_the_second_stands_by(kube, first, second):
    await first.election.step()
    await second.election.step()
    assert (first.leads(), second.leads()) == (True, False)
    for _ in range(20):
        await first.wait(RENEW_S)
        await second.wait(RENEW_S)
    assert (first.leads(), second.leads()) == (True, False)
    assert kube.one(Kind.LEASE, "op", "system")["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_nobody_renews_is_taken_only_after_its_holder_has_stopped(kube, first, second):
    await first.election.step()
    await second.election.step()
    await second.wait(HOLD_S)
    assert not second.leads(), "the first may still write"
    await second.wait(LEASE_S - HOLD_S + RENEW_S)
    assert second.leads()
    first.now_s += HOLD_S  # what had passed at the earliest
    assert not first.leads()


async def test_a_holder_that_slept_stands_by(kube, first, second):
    await first.election.step()
    await second.wait(LEASE_S + RENEW_S)
    first.now_s += 60
    assert not first.leads(), "before its first look"
    await first.wait(3 * RENEW_S)
    assert (first.leads(), second.leads(), holder(kube)) == (False, True, "second")


async def test_a_released_lease_is_taken_at_the_next_look(kube, first, second):
    await first.election.step()
    await second.election.step()
    await first.election.release()
    assert not first.leads()
    await second.election.step()
    assert (second.leads(), holder(kube)) == (True, "second")
    await first.election.release()
    assert holder(kube) == "second", "only the holder releases"


async def test_without_an_answer_it_leads_until_its_time_is_over_and_again_afterwards(kube, first):
    await first.election.step()
    kube.fault = lambda verb, kind, name: UnavailableError(verb, 503, "no")
    await first.wait(HOLD_S - RENEW_S)
    assert first.leads()
    await first.wait(2 * RENEW_S)
    assert not first.leads()
    kube.fault = lambda verb, kind, name: None
    await first.election.step()
    assert first.leads()


async def test_a_renewal_whose_answer_is_lost_costs_no_term(kube, first):
    await first.election.step()
    kube.edit(Kind.LEASE, "system", "op", {"spec": {"renewTime": "what the lost answer would show"}})
    for _ in range(4):
        await first.wait(RENEW_S)
        assert first.leads()


@pytest.mark.parametrize("is_stored", [True, False], ids=["answer lost", "request lost"])
async def test_a_renewal_without_an_answer_in_time_costs_no_term(kube, first, monkeypatch, is_stored):
    """The longest that one can take, and the wait before it, are more than half of what a renewal is good for."""
    await first.election.step()
    first.now_s += 1.2 * RENEW_S  # the longest pause
    patch = kube.patch_merge

    async def unanswered(*what):
        monkeypatch.setattr(kube, "patch_merge", patch)
        if is_stored:
            await patch(*what)
        first.now_s += LEASE_TIMEOUT_S
        raise UnavailableError("patch Lease op", 0, "no answer")

    monkeypatch.setattr(kube, "patch_merge", unanswered)
    for _ in range(8):
        await first.step()
        assert first.leads()


async def test_of_two_that_see_a_free_lease_one_gets_it(kube, first, second, monkeypatch):
    await first.election.step()
    await first.election.release()
    get = kube.get

    async def get_before_the_first_takes_it(*what):
        monkeypatch.setattr(kube, "get", get)
        free = await get(*what)
        await first.election.step()
        return free

    monkeypatch.setattr(kube, "get", get_before_the_first_takes_it)
    await second.election.step()
    assert first.leads()
    assert (second.leads(), holder(kube)) == (False, "first")


async def test_a_foreign_holder_ends_the_term_at_once(kube, first):
    await first.election.step()
    kube.edit(Kind.LEASE, "system", "op", {"spec": {"holderIdentity": "a person"}})
    await first.wait(RENEW_S)
    await first.election.step()
    assert not first.leads()
