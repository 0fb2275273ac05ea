"""The operator dies after each single write, restarts, and reaches the same state as an undisturbed one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.unit.operator.simulation import World, attempt_objects, run


@dataclass(frozen=True, kw_only=True)
class Lifecycle:
    """The lifecycle of a job: what happens to it, and how it ends."""

    name: str
    fates: Mapping[int, str]
    spec: Mapping[str, Any] = field(default_factory=dict)
    edits: Mapping[int, Callable[[World], None]] = field(default_factory=dict)
    until_s: int = 120
    ends: str | None
    """Reason of Succeeded at the end; None: the job is deleted."""
    attempts: int = 1

    def world(self) -> World:
        return World(self.fates, **self.spec)


RESTARTS = {"failurePolicy": {"maxRestarts": 2, "restartBackoffSeconds": 10}}
LIFECYCLES = [
    Lifecycle(name="success", fates={1: "success"}, ends="Completed"),
    Lifecycle(name="fail, restart, success", fates={1: "fail", 2: "success"}, spec=RESTARTS, until_s=200, ends="Completed", attempts=2),
    Lifecycle(
        name="fails until no restart is left",
        fates={1: "fail", 2: "fail", 3: "fail"},
        spec=RESTARTS,
        until_s=300,
        ends="WorkerLost",
        attempts=3,
    ),
    Lifecycle(name="start-up deadline", fates={1: "stuck"}, spec={"startupDeadlineSeconds": 40}, ends="StartupDeadlineExceeded"),
    Lifecycle(
        name="start-up deadline, then success",
        fates={1: "stuck", 2: "success"},
        spec={"startupDeadlineSeconds": 40, **RESTARTS},
        until_s=250,
        ends="Completed",
        attempts=2,
    ),
    Lifecycle(
        name="suspend and resume",
        fates={1: "success"},
        edits={25: lambda world: world.edit(suspend=True), 70: lambda world: world.edit(suspend=False)},
        until_s=200,
        ends="Completed",
    ),
    Lifecycle(
        name="suspended before the start",
        fates={1: "success"},
        spec={"suspend": True},
        edits={20: lambda world: world.edit(suspend=False)},
        until_s=150,
        ends="Completed",
    ),
    Lifecycle(
        name="suspended for a moment",
        fates={1: "success"},
        edits={25: lambda world: world.edit(suspend=True), 30: lambda world: world.edit(suspend=False)},
        until_s=200,
        ends="Completed",
    ),
    Lifecycle(
        name="child deleted",
        fates={1: "run", 2: "success"},
        spec=RESTARTS,
        edits={30: lambda world: world.delete_rayjob("math-grpo-a1")},
        until_s=200,
        ends="Completed",
        attempts=2,
    ),
    Lifecycle(name="active deadline", fates={1: "run"}, spec={"activeDeadlineSeconds": 60}, ends="ActiveDeadlineExceeded"),
    Lifecycle(name="time to live", fates={1: "success"}, spec={"ttlSecondsAfterFinished": 30}, until_s=150, ends=None),
    Lifecycle(
        name="time to live of a failed job",
        fates={1: "stuck"},
        spec={"startupDeadlineSeconds": 40, "ttlSecondsAfterFinished": 0},
        ends=None,
    ),
]


@pytest.mark.parametrize("down_s", [0, 15], ids=["at once", "15 s later"])
@pytest.mark.parametrize("lifecycle", LIFECYCLES, ids=lambda lifecycle: lifecycle.name)
def test_it_converges_whenever_it_dies(lifecycle: Lifecycle, down_s: int) -> None:
    undisturbed = run(lifecycle.world(), lifecycle.until_s, lifecycle.edits, dies_after=None, down_s=0)
    if lifecycle.ends is None:
        assert undisturbed.job is None
        assert undisturbed.objects() == set()
    else:
        assert reason(undisturbed) == lifecycle.ends
        assert undisturbed.outcome()["attempt"] == lifecycle.attempts
        assert not undisturbed.pods
    assert undisturbed.num_writes >= 4, "otherwise there is nothing to die after"
    for dies_after in range(1, undisturbed.num_writes + 1):
        disturbed = run(lifecycle.world(), lifecycle.until_s + 2 * down_s + 20, lifecycle.edits, dies_after=dies_after, down_s=down_s)
        assert disturbed.outcome() == undisturbed.outcome(), f"died after write {dies_after}"
        assert disturbed.objects() == undisturbed.objects(), f"died after write {dies_after}"
        assert disturbed.most_live == 1


def test_a_life_takes_few_writes() -> None:
    """Two objects, and a status for: made, nodes, driver, done."""
    world = run(World({1: "success"}), 120, {}, dies_after=None, down_s=0)
    assert world.num_writes <= 6


def test_the_world_sees_two_live_rayjobs() -> None:
    world = World({1: "run", 2: "run"})
    assert world.job is not None
    for manifest in attempt_objects(world.job, 1):
        world.create(manifest)
    rayjob = attempt_objects(world.job, 2)[-1]
    with pytest.raises(AssertionError, match="two live RayJobs"):
        world.create(rayjob)


def reason(world: World) -> str:
    return next(c["reason"] for c in world.outcome()["conditions"] if c["type"] == "Succeeded")
