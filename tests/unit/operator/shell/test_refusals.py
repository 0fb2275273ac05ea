"""What the API server or its webhooks refuse is in the status after the same pass, in their words, and tried again until it succeeds."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rljob_operator.errors import KubeError, NotFoundError, RejectedError, UnansweredError, UnavailableError
from rljob_operator.protocol import Kind
from tests.unit.operator.shell.world import World, rljob

DENIED = RejectedError("x", 403, 'admission webhook "policy.example.com" denied the request: no')
DOWN = UnavailableError("x", 500, 'failed calling webhook "hook.example.com": connection refused')
UNHEARD = UnansweredError("x", 0, "no answer within 35 s")
RETRIES = 4


def _fault(verb: str, kind: Kind, error: KubeError) -> Callable[[str, Kind, str], KubeError | None]:
    return lambda v, k, name: error if (v, k) == (verb, kind) else None


def _none(verb: str, kind: Kind, name: str) -> None:
    return None


def _message(world: World, type_: str) -> str:
    return next(c["message"] for c in world.status()["conditions"] if c["type"] == type_)


def _status_writes(world: World) -> int:
    return sum(write.startswith("apply_status") for write in world.kube.writes)


async def _second_attempt(kind: Kind, change: dict[str, Any], fault: Callable[[str, Kind, str], KubeError | None]) -> World:
    """Attempt 1 has failed, a child that the next one shares was modified, and its repair meets a fault."""
    world = World(lambda attempt: "FAILED" if attempt == 1 else "SUCCEEDED")
    world.kube.add(rljob(failurePolicy={"maxRestarts": 3}))
    await world.settle(until=lambda: "lastFailure" in world.status())
    world.kube.edit(kind, "team", "math-rljob", change)
    world.kube.fault = fault
    return world


SHARED: dict[Kind, dict[str, Any]] = {Kind.ROLE: {"rules": []}, Kind.NETWORK_POLICY: {"spec": {"ingress": [{}]}}}


@pytest.mark.parametrize("verb", ["patch", "get"])
@pytest.mark.parametrize(("kind", "change"), SHARED.items())
def test_a_repair_that_is_rejected_is_reported_at_once_and_tried_again(kind: Kind, change: dict[str, Any], verb: str):
    async def scenario() -> World:
        world = await _second_attempt(kind, change, _fault(verb, kind, DENIED))
        await world.settle(hours=0.05)
        assert world.condition("Accepted") == ("False", "ChildRejected")
        assert world.condition("Running") == ("False", "ChildRejected")
        assert f'{kind} math-rljob exists and cannot be brought up to date: admission webhook "policy.example.com" denied' in _message(
            world, "Accepted"
        )
        assert world.created(Kind.RAYJOB) == ["math-a1"], "an attempt with wider rights than it should have"
        assert world.status()["attempt"] == 1
        writes = _status_writes(world)
        await world.settle(hours=0.05)
        assert _status_writes(world) == writes, "said once"
        world.kube.fault = _none
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert f"patch {kind} math-rljob" in world.kube.writes


def test_a_repair_that_meets_a_webhook_that_is_down_is_reported_at_once():
    async def scenario() -> World:
        world = await _second_attempt(Kind.ROLE, {"rules": []}, _fault("patch", Kind.ROLE, DOWN))
        await world.settle(until=lambda: len(world.errors) > RETRIES)
        assert world.condition("Running") == ("False", "ApiUnavailable")
        assert "hook.example.com" in _message(world, "Running")
        world.kube.fault = _none
        await world.settle()
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("True", "Completed")


def test_a_repair_does_not_take_over_an_object_that_has_just_replaced_the_own_one(monkeypatch):
    async def scenario() -> World:
        world = await _second_attempt(Kind.ROLE, {"rules": []}, _none)
        get, foreign = world.kube.get, {"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}

        async def read_then_replaced(kind: Kind, namespace: str, name: str) -> Any:
            found = await get(kind, namespace, name)
            if kind is Kind.ROLE:
                monkeypatch.setattr(world.kube, "get", get)
                world.kube.remove(kind, namespace, name)
                metadata = {"name": name, "namespace": namespace}
                world.kube.add({"apiVersion": kind.api_version, "kind": str(kind), "metadata": metadata, **foreign})
            return found

        monkeypatch.setattr(world.kube, "get", read_then_replaced)
        await world.settle(hours=0.05)
        assert world.kube.one(Kind.ROLE, "math-rljob")["rules"] == foreign["rules"]
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("Unknown", "ChildNameTaken")


def test_a_kind_that_is_not_served_is_reported():
    async def scenario() -> World:
        world = World()
        world.kube.add(rljob())
        missing = NotFoundError("create NetworkPolicy", 404, "the server could not find the requested resource")
        world.kube.fault = _fault("create", Kind.NETWORK_POLICY, missing)
        await world.settle(hours=0.01)
        assert world.condition("Succeeded") == ("Unknown", "ChildRejected")
        assert "NetworkPolicy math-rljob: the server could not find the requested resource" in _message(world, "Accepted")
        world.kube.fault = _none
        await world.settle()
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("True", "Completed")


def test_a_rayjob_whose_creation_is_not_answered_in_time_is_reported():
    async def scenario() -> World:
        world = World()
        world.kube.add(rljob())
        world.kube.fault = _fault("create", Kind.RAYJOB, UNHEARD)
        await world.settle(until=lambda: len(world.errors) > RETRIES)
        assert world.condition("Running") == ("False", "ApiUnavailable")
        assert "no answer within 35 s" in _message(world, "Running")
        world.kube.fault = _none
        await world.settle()
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("True", "Completed")


@pytest.mark.parametrize("error", [DENIED, DOWN, UNHEARD], ids=["denied", "webhook down", "no answer"])
def test_a_suspension_that_is_refused_is_reported_at_once_and_tried_again(error: KubeError):
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob())
        await world.settle()
        world.kube.fault = _fault("patch", Kind.RAYJOB, error)
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": True}})
        before = _status_writes(world)
        await world.settle(until=lambda: len(world.errors) > RETRIES)
        assert _status_writes(world) == before + 1, "said once"
        assert world.condition("Suspended") == ("False", "Suspended")
        for type_ in ("Suspended", "Running", "Succeeded"):
            assert "RayJob math-a1 still holds nodes." in _message(world, type_)
            assert error.message in _message(world, type_)
        world.kube.fault = _none
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Suspended") == ("True", "Suspended")
    assert error.message not in _message(world, "Running")


def test_a_deletion_before_the_next_attempt_that_is_refused_is_reported_and_no_second_rayjob_is_made():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING" if attempt == 1 else "SUCCEEDED")
        world.kube.add(rljob())
        await world.settle()
        world.kube.fault = _fault("delete", Kind.RAYJOB, DENIED)
        head = next(name for name in world.kube.names(Kind.POD) if name.endswith("headgroup"))
        world.kube.edit(Kind.POD, "team", head, {"metadata": {"deletionTimestamp": "2026-01-01T01:00:00Z"}})
        await world.settle(until=lambda: len(world.errors) > RETRIES)
        assert world.condition("Running") == ("False", "Restarting")
        assert 'once RayJob math-a1 is gone. x: 403 admission webhook "policy.example.com" denied' in _message(world, "Running")
        assert world.created(Kind.RAYJOB) == ["math-a1"]
        world.kube.fault = _none
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a2"]


def test_the_status_of_a_finished_job_stays_final_when_its_rayjob_cannot_be_deleted():
    async def scenario() -> World:
        world = World(lambda attempt: "RUNNING")
        world.kube.add(rljob(activeDeadlineSeconds=60))
        await world.settle(until=lambda: world.status() and world.condition("Running")[0] == "True")
        world.kube.fault = _fault("delete", Kind.RAYJOB, DENIED)
        await world.settle(until=lambda: len(world.errors) > RETRIES)
        assert world.condition("Failed") == ("True", "ActiveDeadlineExceeded")
        final = world.status()
        world.kube.fault = _none
        await world.settle()
        assert world.status() == final
        return world

    assert asyncio.run(scenario()).kube.names(Kind.RAYJOB) == []
