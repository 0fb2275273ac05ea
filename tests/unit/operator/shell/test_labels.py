"""Somebody edits the labels by which RayJobs are watched: the job continues, and the labels are restored."""

import asyncio
from typing import Any

import pytest

from rljob_api.naming import ATTEMPT_LABEL, JOB_LABEL
from rljob_operator.errors import KubeError, RejectedError
from rljob_operator.protocol import Kind
from tests.unit.operator.shell.world import World, rljob


async def _edited(labels: dict[str, Any]) -> World:
    """A job whose RayJob runs and whose labels somebody has edited."""
    world = World(lambda attempt: "RUNNING")
    world.kube.add(rljob())
    await world.settle()
    assert world.condition("Running")[0] == "True"
    world.kube.edit(Kind.RAYJOB, "team", "math-a1", {"metadata": {"labels": labels}})
    return world


def _patches(world: World) -> list[str]:
    return [write for write in world.kube.writes if write.startswith("patch ")]


@pytest.mark.parametrize(
    "labels", [{JOB_LABEL: None}, {JOB_LABEL: None, ATTEMPT_LABEL: None}, {ATTEMPT_LABEL: None}, {ATTEMPT_LABEL: "7"}], ids=str
)
def test_a_rayjob_without_its_labels_is_not_taken_for_deleted_and_gets_them_back(labels: dict[str, Any]):
    async def scenario() -> World:
        world = await _edited(labels)
        await world.settle()
        assert world.condition("Running")[0] == "True"
        stored = world.kube.one(Kind.RAYJOB, "math-a1")["metadata"]["labels"]
        assert (stored[JOB_LABEL], stored[ATTEMPT_LABEL]) == ("math", "1")
        world.kuberay.outcome = lambda attempt: "SUCCEEDED"
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert "lastFailure" not in world.status()
    assert world.created(Kind.RAYJOB) == ["math-a1"]
    assert _patches(world) == ["patch RayJob math-a1"]
    (event,) = [e for (kind, _, _), e in world.kube.objects.items() if kind is Kind.EVENT and e["reason"] == "LabelsRestored"]
    assert event["type"] == "Warning"
    assert "RayJob math-a1" in event["message"]


def test_the_label_of_another_job_gives_it_no_rayjob():
    async def scenario() -> World:
        world = await _edited({JOB_LABEL: "other"})
        world.kuberay.step = lambda: False  # type: ignore[method-assign]  # no pod changes, which would wake the job as well
        world.kube.set_status(Kind.RAYJOB, "team", "math-a1", jobDeploymentStatus="Complete", jobStatus="SUCCEEDED")
        await world.settle(hours=0.01)
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.created(Kind.RAYJOB) == ["math-a1"]


def test_nothing_is_decided_while_the_labels_cannot_be_restored():
    async def scenario() -> World:
        world = await _edited({JOB_LABEL: None})
        denied = RejectedError("patch RayJob math-a1", 403, "labels are frozen")

        def fault(verb: str, kind: Kind, name: str) -> KubeError | None:
            return denied if (verb, kind) == ("patch", Kind.RAYJOB) else None

        world.kube.fault = fault
        await world.settle(until=lambda: len(world.errors) > 3)
        assert world.condition("Running")[0] == "True"
        world.kube.fault = lambda verb, kind, name: None
        world.kuberay.outcome = lambda attempt: "SUCCEEDED"
        await world.settle()
        return world

    assert asyncio.run(scenario()).condition("Succeeded") == ("True", "Completed")


def test_labels_that_a_program_removes_again_and_again_are_restored_with_one_event_and_decide_nothing():
    async def scenario() -> World:
        world = await _edited({JOB_LABEL: None})
        patch_merge = world.kube.patch_merge

        async def removed_again(kind: Kind, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
            stored = await patch_merge(kind, namespace, name, patch)
            return world.kube.edit(kind, namespace, name, {"metadata": {"labels": {JOB_LABEL: None}}}) if kind is Kind.RAYJOB else stored

        world.kube.patch_merge = removed_again  # type: ignore[method-assign]
        await world.settle(until=lambda: len(world.errors) > 3)
        return world

    world = asyncio.run(scenario())
    assert world.condition("Running")[0] == "True"
    assert "removes rljob.dev/job again" in str(world.errors[0])
    assert not [e for (kind, _, _), e in world.kube.objects.items() if kind is Kind.EVENT and e["reason"] == "LabelsRestored"]


def test_a_job_of_another_controller_is_only_read():
    async def scenario() -> World:
        world = await _edited({})
        stored = world.kube.one(Kind.RLJOB, "math")
        stored["spec"]["managedBy"] = "example.com/other"
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"managedBy": "example.com/other"}})
        world.kube.edit(Kind.RAYJOB, "team", "math-a1", {"metadata": {"labels": {JOB_LABEL: None}}})
        await world.settle(hours=0.1)
        return world

    assert _patches(asyncio.run(scenario())) == []


def test_a_rayjob_of_another_owner_in_its_place_is_left_alone():
    async def scenario() -> World:
        world = await _edited({})
        world.kube.remove(Kind.RAYJOB, "team", "math-a1")
        world.kube.add({"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "math-a1", "namespace": "team"}, "spec": {}})
        world.kuberay.step = lambda: False  # type: ignore[method-assign]
        await world.settle(hours=0.1)
        return world

    world = asyncio.run(scenario())
    assert world.status()["lastFailure"]["reason"] == "ChildDeleted"
    assert "labels" not in world.kube.one(Kind.RAYJOB, "math-a1")["metadata"]
