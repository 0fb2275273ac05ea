"""An operator whose version checks more than the one before: jobs that have started continue, others are refused."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rljob_api import naming, validation
from rljob_operator.protocol import Kind
from tests.unit.operator.shell.world import World, rljob

IDLE = {"steps": 200, "minLearningRate": 1e-7}
"""A setting without effect, which a version with fewer rules accepts."""
LATE = {"steps": 200, "minLearningRate": 1e-7, "warmupSteps": 150}


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Callable[[World], None]:
    """Begins with a version without rules; what it returns upgrades."""
    monkeypatch.setattr(validation, "RULES", ())

    def upgrade(world: World) -> None:
        monkeypatch.undo()
        world.is_booted = False

    return upgrade


def _fails_once(attempt: int) -> str:
    return "FAILED" if attempt == 1 else "SUCCEEDED"


def _accepted(world: World) -> dict[str, Any]:
    return next(c for c in world.status()["conditions"] if c["type"] == "Accepted")


async def _running(outcome: Callable[[int], str], **spec: Any) -> World:
    """A job whose first attempt runs."""
    world = World(lambda attempt: "RUNNING")
    world.kube.add(rljob(**spec))
    await world.settle()
    assert world.condition("Running")[0] == "True"
    world.kuberay.outcome = outcome
    return world


def _environment(world: World, rayjob: str) -> dict[str, str]:
    head = world.kube.one(Kind.RAYJOB, rayjob)["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    return {variable["name"]: variable.get("value", "") for variable in head["env"]}


@pytest.mark.parametrize("trained", [True, False])
def test_a_job_that_has_started_restarts_and_says_what_a_new_job_would_be_refused_for(older: Callable[[World], None], trained: bool):
    async def scenario() -> World:
        world = await _running(_fails_once, training=IDLE, failurePolicy={"maxRestarts": 1})
        if trained:  # which only a driver reports
            world.kube.set_status(Kind.RLJOB, "team", "math", progress={"attempt": 1, "step": 3})
        older(world)
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a2"]
    assert world.condition("Succeeded") == ("True", "Completed")
    accepted = _accepted(world)
    assert (accepted["status"], accepted["reason"]) == ("True", "SpecValid")
    assert accepted["message"].startswith("The job has started and continues.")
    assert "spec.training.minLearningRate" in accepted["message"]
    assert naming.ENV_HAS_STARTED not in _environment(world, "math-a1")
    assert (naming.ENV_HAS_STARTED in _environment(world, "math-a2")) == trained, "its driver applies the same rule if one has before"


def test_a_job_that_has_started_resumes(older: Callable[[World], None]):
    async def scenario() -> World:
        world = await _running(lambda attempt: "SUCCEEDED" if resumed else "RUNNING", training=IDLE)
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": True}})
        await world.settle()
        world.kube.remove(Kind.RAYJOB, "team", "math-a1")  # so that the same attempt is created again
        older(world)
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": False}})
        resumed.append(True)
        await world.settle()
        return world

    resumed: list[bool] = []
    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")
    assert world.created(Kind.RAYJOB) == ["math-a1", "math-a1"]


def test_a_job_that_has_not_started_is_refused(older: Callable[[World], None]):
    async def scenario() -> World:
        world = World()
        world.kube.add(rljob(training=IDLE, suspend=True))
        await world.settle()
        assert world.condition("Accepted") == ("True", "SpecValid")
        older(world)
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": False}})
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Accepted") == ("False", "SpecInvalid")
    assert world.created(Kind.RAYJOB) == []


def test_a_problem_that_an_edit_has_caused_stops_the_next_attempt_until_it_is_edited_back(older: Callable[[World], None]):
    async def scenario() -> World:
        world = await _running(_fails_once, training=LATE, failurePolicy={"maxRestarts": 1})
        older(world)
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"training": {"steps": 100}}})
        await world.settle()
        assert world.condition("Accepted") == ("False", "SpecInvalid")
        message = _accepted(world)["message"]
        assert "spec.training.warmupSteps" in message
        assert "minLearningRate" not in message, "no edit solves this one"
        assert world.created(Kind.RAYJOB) == ["math-a1"]
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"training": {"steps": 200}}})
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Succeeded") == ("True", "Completed")


@pytest.mark.parametrize(
    "edit",
    [{"seed": 7}, {"nodeGroups": [{"name": "local", "nodes": 1, "devicesPerNode": 1, "deviceResource": "cpu"}]}, {"misspelled": 1}],
    ids=["another immutable field changed", "no placement", "unknown key"],
)
def test_what_is_not_the_spec_that_it_started_with_is_refused(edit: dict[str, Any], older: Callable[[World], None]):
    async def scenario() -> World:
        world = await _running(_fails_once, training=IDLE, failurePolicy={"maxRestarts": 1})
        older(world)
        world.kube.edit(Kind.RLJOB, "team", "math", {"spec": edit})  # where the API server does not see it
        await world.settle()
        return world

    world = asyncio.run(scenario())
    assert world.condition("Accepted") == ("False", "SpecInvalid")
    assert world.created(Kind.RAYJOB) == ["math-a1"]
