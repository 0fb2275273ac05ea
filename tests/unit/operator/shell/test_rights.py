"""Least privilege: the chart grants exactly the requests that the operator makes."""

import asyncio
from collections.abc import Callable
from itertools import product
from typing import Any

from rljob_operator.errors import ConflictError, KubeError, RejectedError
from rljob_operator.protocol import WATCHED, Kind
from tests.support.chart import rules
from tests.unit.operator.shell.test_reconcile import CHANGES
from tests.unit.operator.shell.world import World, rljob

Right = tuple[str, str, str]
"""API group, resource, verb."""
Fault = Callable[[str, Kind, str], KubeError | None]


def granted() -> set[Right]:
    return {right for rule in rules() for right in product(rule["apiGroups"], rule["resources"], rule["verbs"])}


def right(verb: str, kind: Kind) -> Right:
    """The right that a request of the operator's client needs."""
    group = kind.api_version.rpartition("/")[0]
    return (group, f"{kind.plural}/status", "patch") if verb == "apply_status" else (group, kind.plural, verb)


class Recorder:
    """Notes the rights that requests need, and lets them fail as a test wants."""

    def __init__(self) -> None:
        self.used: set[Right] = set()
        self.fault: Fault = lambda verb, kind, name: None

    def __call__(self, verb: str, kind: Kind, name: str) -> KubeError | None:
        self.used.add(right(verb, kind))
        return self.fault(verb, kind, name)


def world(recorder: Recorder, outcome: str, **spec: Any) -> World:
    built = World(lambda attempt: outcome if attempt == 1 else "SUCCEEDED")
    built.kube.fault = recorder
    built.kube.add(rljob(**spec))
    return built


async def all_requests() -> set[Right]:
    """A restart, a conflict, a suspension, a pod without containers, modified and existing objects, the end of a time to live."""
    recorder = Recorder()
    conflicts = iter([ConflictError("apply_status", 409, "the object has been modified")])
    recorder.fault = lambda verb, kind, name: next(conflicts, None) if verb == "apply_status" else None
    await world(recorder, "FAILED", failurePolicy={"maxRestarts": 1}, ttlSecondsAfterFinished=1).settle()

    for more in ({}, {"queue": {"name": "team"}}):
        running = world(recorder, "RUNNING", **more)
        await running.settle(hours=0.01)
        for suspend in (True, False):
            running.kube.edit(Kind.RLJOB, "team", "math", {"spec": {"suspend": suspend}})
            await running.settle(hours=0.01)

    stalled = world(recorder, "RUNNING")
    await stalled.stall()
    await stalled.settle(hours=0.1)

    for kind, change in CHANGES.items():
        modified = world(recorder, "SUCCEEDED", refuseEvictions=True)
        rejection = RejectedError("create", 403, "exceeded quota")
        recorder.fault = lambda verb, kind, name, error=rejection: error if (verb, kind) == ("create", Kind.RAYJOB) else None
        await modified.settle(hours=0.01)
        recorder.fault = lambda verb, kind, name: None
        modified.kube.edit(kind, "team", "math-rljob", change)
        modified.is_booted = False
        await modified.settle()
    return recorder.used


def test_every_request_is_granted_and_nothing_more():
    used = asyncio.run(all_requests())
    assert used - granted() == set(), "a request that the API server would refuse"
    # kopf watches; owner references that block the owner's deletion need a right on its finalizers.
    unseen = {right("watch", kind) for kind in WATCHED} | {("rljob.dev", "rljobs/finalizers", "update")}
    assert granted() - used == unseen, "rights that nothing needs"
