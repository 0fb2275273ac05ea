"""Two operators on one lease: one acts, the other takes over, and one that was away writes nothing."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kube_api import ApiServer
from tests.integration.operator_world.process import OperatorProcess
from tests.integration.operator_world.world import SUCCEEDED, World

WRITES = ("create", "patch", "apply_status", "delete")


@pytest.fixture
def world(api_server: ApiServer, namespace: str) -> World:
    return World(api_server, namespace)


@pytest.fixture
def pair(api_server: ApiServer, world: World, tmp_path: Path) -> Iterator[tuple[OperatorProcess, OperatorProcess]]:
    """The leader and its standby."""
    lease = f"{world.namespace}/operator"
    first, second = (
        OperatorProcess(api_server.kubeconfig, tmp_path / f"{name}.log", namespaces=world.namespace, lease=lease) for name in ("a", "b")
    )
    try:
        first.start()
        world.until("the first leads", lambda: leads(first))
        second.start()
        yield first, second
    finally:
        for process in (first, second):
            process.kill()


def sample(process: OperatorProcess, name: str) -> dict[str, float]:
    """Labels -> value."""
    found = re.findall(rf"^rljob_operator_{name}(?:{{(.*)}})? (\S+)$", process.metrics(), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def leads(process: OperatorProcess) -> bool:
    return sample(process, "leader") == {"": 1.0}


def writes(process: OperatorProcess) -> float:
    """Writes that this process has asked for, those of the lease apart."""
    counts = sample(process, "requests_total")
    return sum(n for labels, n in counts.items() if 'kind="Lease"' not in labels and any(f'verb="{verb}"' in labels for verb in WRITES))


def events_of(world: World, job: str) -> list[str]:
    """Reasons."""
    return world.kubectl("get", "events", f"--field-selector=involvedObject.name={job}", "-o", "jsonpath={.items[*].reason}").split()


def holder(world: World) -> str:
    return (world.get("lease", "operator") or {})["spec"].get("holderIdentity", "")


def until_taken_over(world: World, heir: OperatorProcess, job: str) -> None:
    """Until the heir has made the RayJob of a job that is applied now."""
    world.job(job)
    world.until("the standby leads", lambda: leads(heir))
    world.until_child(f"{job}-a1")


def test_a_killed_leader_is_replaced(world: World, pair: tuple[OperatorProcess, OperatorProcess]):
    leader, standby = pair
    world.job("before")
    world.runs("before-a1")
    world.until_condition("before", "Running", "True/Running")
    assert (leads(leader), leads(standby), writes(standby)) == (True, False, 0)
    world.until("the standby follows", lambda: sample(standby, "jobs") == {'reason="Running"': 1.0})
    leader.kill()
    world.rayjob_status("before-a1", **SUCCEEDED)
    until_taken_over(world, standby, "after")
    world.until_condition("before", "Succeeded", "True/Completed")
    assert [o["metadata"]["name"] for o in world.list("rayjobs", "before")] == ["before-a1"]


def test_a_leader_that_is_asked_to_end_hands_over_at_once(world: World, pair: tuple[OperatorProcess, OperatorProcess]):
    leader, standby = pair
    held_by = holder(world)
    assert held_by
    assert leader.stop() == 0
    assert holder(world) != held_by, "the lease is released, not left to expire"
    until_taken_over(world, standby, "next")


@pytest.mark.slow
def test_a_leader_that_was_stopped_and_continues_writes_nothing(world: World, pair: tuple[OperatorProcess, OperatorProcess]):
    stale, heir = pair
    world.job("paused")
    world.runs("paused-a1")
    world.until_condition("paused", "Running", "True/Running")
    world.until("the last write, its event, is there", lambda: "Running" in events_of(world, "paused"))
    written, held_by = writes(stale), holder(world)
    os.kill(stale.pid, signal.SIGSTOP)
    try:
        until_taken_over(world, heir, "meanwhile")
        # Something for the stale leader to act on: it has the connections, the cache and the reason.
        world.rayjob_status("paused-a1", **SUCCEEDED)
        world.until_condition("paused", "Succeeded", "True/Completed")
        world.job("unseen", suspend=True)
    finally:
        os.kill(stale.pid, signal.SIGCONT)
    world.until("the stale leader knows that it is none", lambda: not leads(stale))
    world.until("it follows again", lambda: sum(sample(stale, "jobs").values()) == 3)
    assert writes(stale) == written
    assert (leads(heir), holder(world) != held_by) == (True, True)
