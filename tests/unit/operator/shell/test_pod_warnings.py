"""Events about pods whose containers are not created: which are read, how often, and what reaches the status."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from rljob_operator.errors import RejectedError
from rljob_operator.model import Key, PodView
from rljob_operator.pod_warnings import PodWarnings
from rljob_operator.protocol import Kind
from rljob_operator.times import text
from tests.support.operator_scene import at, pod
from tests.unit.operator.shell.fake_kube import FakeKube
from tests.unit.operator.shell.world import World, rljob

KEY = Key(namespace="team", name="math")
MOUNT = 'MountVolume.SetUp failed for volume "keys" : secret "hub" not found'
PERSISTS = "Unable to attach or mount volumes: unmounted volumes=[keys]: timed out waiting for the condition"


def warn(kube: FakeKube, name: str, message: str, seconds: float, *, reason: str = "FailedMount", about: str = "a", **more: Any) -> None:
    """A node's event about a pod."""
    when = more or {"lastTimestamp": text(at(seconds))}
    metadata = {"namespace": "team", "name": name}
    involved = {"kind": "Pod", "name": about}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": involved, "type": "Warning"}
    kube.add({**event, "reason": reason, "message": message, **when})


def explained(warnings: PodWarnings, seconds: float, *pods: PodView) -> list[str | None]:
    return [view.warning for view in asyncio.run(warnings.explained(KEY, pods, at(seconds)))]


def creating(name: str = "a", seconds: float = 0) -> PodView:
    return pod(name, ready=False, phase="Pending", creating_since=at(seconds))


def test_the_cause_is_preferred_and_what_blocks_nothing_or_is_over_is_not() -> None:
    kube = FakeKube()
    warn(kube, "e1", MOUNT, 100)
    warn(kube, "e2", PERSISTS, 190)
    warn(kube, "e3", "0/3 nodes are available", 195, reason="FailedScheduling")
    warn(kube, "e4", "Multi-Attach error", 195, reason="FailedAttachVolume", about="b")
    warn(kube, "e5", "no network", 0, reason="FailedCreatePodSandBox", about="c", lastTimestamp=None, eventTime=text(at(150)))
    asked = (creating("a"), creating("b"), creating("c"), creating("d"), pod("e"))
    said = [f"FailedMount: {MOUNT}", "FailedAttachVolume: Multi-Attach error", "FailedCreatePodSandBox: no network", None, None]
    assert explained(PodWarnings(kube), 200, *asked) == said, "of three pods"
    assert explained(PodWarnings(kube), 450, creating("a")) == [f"FailedMount: {PERSISTS}"]
    assert explained(PodWarnings(kube), 500, creating("a")) == [None]


def test_events_are_read_late_and_rarely() -> None:
    kube, reads = FakeKube(), []
    kube.fault = lambda verb, kind, name: reads.append(kind)
    warnings = PodWarnings(kube)
    assert explained(warnings, 119, creating()) == [None]
    assert reads == []
    explained(warnings, 120, creating())
    warn(kube, "e1", MOUNT, 130)
    assert explained(warnings, 239, creating()) == [None]
    assert explained(warnings, 240, creating()) == [f"FailedMount: {MOUNT}"]
    assert reads == [Kind.EVENT] * 2


def test_events_that_may_not_be_read_are_logged_once_and_hide_nothing(caplog: pytest.LogCaptureFixture) -> None:
    kube = FakeKube()
    warn(kube, "e1", MOUNT, 100)
    warnings = PodWarnings(kube)
    assert explained(warnings, 120, creating()) == [f"FailedMount: {MOUNT}"]
    kube.fault = lambda verb, kind, name: RejectedError("list Event", 403, "events is forbidden")
    assert explained(warnings, 240, creating()) == [f"FailedMount: {MOUNT}"], "what was known"
    explained(warnings, 360, creating())
    assert [record.getMessage() for record in caplog.records] == [
        "events of pods cannot be read, so no condition says why containers are not created: list Event: 403 events is forbidden"
    ]


def test_the_reason_reaches_the_conditions_of_a_job() -> None:
    """A Secret that podTemplate mounts does not exist: the pod alone says nothing of it."""
    world = World()
    world.kube.add(rljob(startupDeadlineSeconds=900))

    async def run() -> None:
        name = await world.stall()
        warn(world.kube, "e1", MOUNT, 0, about=name, lastTimestamp=text(world.now + timedelta(seconds=100)))
        await world.settle(hours=0.1)

    asyncio.run(run())
    assert world.condition("ClusterReady") == ("False", "PodFailed")
    found = next(c["message"] for c in world.status()["conditions"] if c["type"] == "ClusterReady")
    assert found.endswith(f"whose containers its node cannot create: FailedMount: {MOUNT}")
