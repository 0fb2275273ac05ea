"""The role of the recipe: planned, in both tables, its workers started with their settings and called as a component of the job."""

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import Role
from rljob_api.validation import CheckedJob, check
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.job import device_sharing, launch
from rljob_runtime.job.roles import ROLES
from tests.unit.api.manifests import manifest


def job_with(placement: dict[str, Any]) -> CheckedJob:
    document = manifest()
    document["spec"]["components"].append({"name": "games", "role": "Arcade", "placement": placement})
    return check(document)


assert set(TRAITS) == set(ROLES) == set(Role)
checked = job_with({"workers": 2})
spec, plan = checked.job.spec, checked.plan
running: dict[str, list[InProcessWorker]] = {component.name: [] for component in plan.components}
for worker in launch.worker_specs(spec, plan, plan.component("games"), None, Path("logs")):
    assert worker.env["GAME"] == "countdown"
    module, name = worker.factory.split(":")
    running["games"].append(InProcessWorker(worker.name, getattr(import_module(module), name)(**worker.kwargs)))
assert [worker.name for worker in running["games"]] == ["games-0", "games-1"]


async def scores() -> list[float]:
    leases = device_sharing.DeviceLeases(arbiter=None, clients={})
    (games,) = launch.job_workers(spec, plan, running, leases).with_role(Role("Arcade"))
    played: list[float] = await games.group.call("play", 1)
    return played


assert asyncio.run(scores()) == [3.0, 4.0]
with pytest.raises(SpecInvalidError, match=r"spec\.components\[3\]"):
    job_with({"deviceMapping": "[0]"})
