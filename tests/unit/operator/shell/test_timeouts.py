"""A reconcile that is cancelled, at its deadline or for the slow lane, loses nothing of what it has created."""

import asyncio
from collections import Counter

import pytest

from rljob_operator.model import Manifest
from rljob_operator.protocol import Kind
from tests.unit.operator.shell.world import KEY, World, rljob


@pytest.mark.parametrize("kind", [Kind.SERVICE_ACCOUNT, Kind.ROLE_BINDING, Kind.RAYJOB])
def test_only_what_was_not_created_is_requested_again(kind: Kind, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> tuple[World, Counter[str]]:
        world = World()
        world.kube.add(rljob())
        await world.boot()
        requested: Counter[str] = Counter()
        hangs, create = asyncio.Event(), world.kube.create

        async def hanging(manifest: Manifest) -> Manifest:
            requested[manifest["kind"]] += 1
            if manifest["kind"] == kind and not hangs.is_set():
                await asyncio.sleep(0)  # the others of the stage are done
                hangs.set()
                await asyncio.Event().wait()
            return await create(manifest)

        monkeypatch.setattr(world.kube, "create", hanging)
        reconcile = asyncio.create_task(world.reconciler.reconcile(KEY))
        await hangs.wait()
        reconcile.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reconcile
        assert "attempt" not in world.status()
        await world.settle()
        return world, requested

    world, requested = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    del requested["Event"]
    assert requested == {**dict.fromkeys(requested, 1), str(kind): 2}
    assert len(requested) == 5


def test_a_rayjob_is_never_taken_for_created_from_memory(monkeypatch: pytest.MonkeyPatch):
    """Its creation is answered, the reconcile ends before the status is written, and somebody deletes it."""

    async def scenario() -> World:
        world = World()
        world.kube.add(rljob())
        await world.boot()
        create, made = world.kube.create, asyncio.Event()

        async def cut(manifest: Manifest) -> Manifest:
            stored = await create(manifest)
            if manifest["kind"] == Kind.RAYJOB and not made.is_set():
                made.set()
                reconcile.cancel()
            return stored

        monkeypatch.setattr(world.kube, "create", cut)
        reconcile = asyncio.create_task(world.reconciler.reconcile(KEY))
        with pytest.raises(asyncio.CancelledError):
            await reconcile
        world.kube.remove(Kind.RAYJOB, "team", "math-a1")
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a1"]
