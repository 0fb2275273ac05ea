"""The parts of the tests of placement that use Ray, in processes of their own: a crash of Ray ends one of them, never the tests.

``python -m tests.integration.placement_child CASE FOLDER [ADDRESS [TIMEOUT_S]]`` with the node groups and components on one line of
standard input as ``{"groups": [...], "components": [...]}``; answers are lines of JSON on standard output, what Ray prints goes elsewhere.

| case    | what it does                                                                                                    |
|---------|-----------------------------------------------------------------------------------------------------------------|
| `nodes` | starts Ray's nodes of the plan, says ``{"address"}``, and ends them when standard input ends                    |
| `probe` | runs a probe as every worker of the plan, says ``{"workers": {component: [[node rank, Python, environment]]}}`` |
| `hold`  | takes the plan's devices, says ``{"held": true}``, then at every line ``{"CREATED", "PENDING"}``: placement     |
|         | groups that have their devices and that wait for them; lets go when standard input ends                         |
| `order` | starts a call that waits for another worker's and then one that does not, on a worker of concurrency 1 and on   |
|         | one of 2, says ``{"orders": [the calls as they ran, for each]}``                                                |

A failure that the runtime reports is ``{"error", "type"}``.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group_table

from rljob_api.naming import NODE_RANK_LABEL
from rljob_api.planner import plan
from rljob_api.planning.plan import Plan, PlannedComponent
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_runtime.cluster.embedded import EmbeddedCluster
from rljob_runtime.cluster.protocol import Worker, WorkerSpec
from rljob_runtime.cluster.ray_cluster import RayCluster
from rljob_runtime.errors import DeadlineError, RuntimeFault
from rljob_runtime.job import launch
from rljob_runtime.job.roles import ROLES
from tests.support.pace import HANG_S
from tests.unit.api.manifests import spec

START_S = HANG_S
PROBE = "tests.integration.placement_probe:Probe"
OVERTAKES_S = 0.5
"""A call that may overtake another does so in a thousandth of it; one that may not is waited for that long."""
ANSWERS = 100
"""File descriptor of what was standard output; Ray prints on that, so :func:`main` turns it to standard error."""


def job(groups: list[dict[str, Any]], components: list[dict[str, Any]]) -> RLJobSpec:
    """A spec with these groups and components."""
    made = spec(groups, components)
    return made.model_copy(update={"training": made.training.model_copy(update={"tensor_parallel_size": 4})})


def say(answer: dict[str, Any]) -> None:
    """Write one answer."""
    os.write(ANSWERS, f"{json.dumps(answer)}\n".encode())


def nodes(planned: Plan, folder: Path) -> None:
    """Ray's head and labeled nodes, without a driver."""
    names = {node.group for node in planned.nodes}
    cluster = EmbeddedCluster(folder, dict.fromkeys(names, 1), {name: {} for name in names})
    say({"address": cluster.start_processes(planned)})
    sys.stdin.read()
    asyncio.run(cluster.stop())


def probes(wanted: RLJobSpec, planned: Plan, component: PlannedComponent, folder: Path) -> list[WorkerSpec]:
    """The very specs of a real job's workers, but for what is constructed."""
    for role in Role:  # those that no job may have yet are placed as the others
        ROLES.setdefault(role, ROLES[Role.REWARD])  # type: ignore[attr-defined]
    specs = launch.worker_specs(wanted, planned, component, None, folder)
    return [dataclasses.replace(s, factory=PROBE, kwargs={}, concurrency=1) for s in specs]


async def answers(workers: list[Worker]) -> list[tuple[int, str, dict[str, str]]]:
    """Planned rank of the node that each worker is on, by Ray's labels; its interpreter; its environment."""
    ranks = {node["NodeID"]: node["Labels"].get(NODE_RANK_LABEL) for node in ray.nodes()}
    found = await asyncio.gather(*(worker.call("where", timeout_s=START_S) for worker in workers))
    return [(int(ranks[node]), interpreter, environment) for node, interpreter, environment in found]


async def probe(wanted: RLJobSpec, planned: Plan, folder: Path, address: str) -> dict[str, Any]:
    """Where every worker is and with what.

    Raises:
        RuntimeFault: they could not be started.
    """
    specs = {c.name: probes(wanted, planned, c, folder) for c in planned.components}
    cluster = RayCluster(address, folder)
    try:
        await cluster.start(planned, START_S, lambda _: None)
        found = iter(await answers(await cluster.start_workers([s for of in specs.values() for s in of], START_S)))
        return {"workers": {name: [next(found) for _ in of] for name, of in specs.items()}}
    finally:
        await cluster.stop()


async def order(planned: Plan, folder: Path, address: str) -> list[list[str]]:
    """Calls as they ran on a worker of concurrency 1 and on one of 2, of which the first waited for an argument."""
    cluster = RayCluster(address, folder)
    try:
        await cluster.start(planned, START_S, lambda _: None)
        node_rank = planned.components[0].processes[0].node_rank
        specs = [
            WorkerSpec(name=f"probe-{i}", factory=PROBE, kwargs={}, node_rank=node_rank, concurrency=concurrency)
            for i, concurrency in enumerate((2, 1, 2))
        ]
        holding, *asked = await cluster.start_workers(specs, START_S)
        held = holding.start("hold")
        calls = [(worker.start("note", "first", held), worker.start("note", "second")) for worker in asked]
        for _, second in calls:
            with contextlib.suppress(DeadlineError):
                await second.result(OVERTAKES_S)
        await holding.call("release", timeout_s=START_S)
        return [max([await call.result(START_S) for call in pair], key=len) for pair in calls]
    finally:
        await cluster.stop()


async def hold(planned: Plan, folder: Path, address: str, timeout_s: float) -> None:
    """Take the devices and keep them.

    Raises:
        RuntimeFault: they were not free in time.
    """
    cluster = RayCluster(address, folder)
    try:
        await cluster.start(planned, timeout_s, lambda _: None)
        say({"held": True})
        while await asyncio.to_thread(sys.stdin.readline):
            states = [group["state"] for group in placement_group_table().values()]
            say({state: states.count(state) for state in ("CREATED", "PENDING")})
    finally:
        await cluster.stop()


def main(case: str, folder: Path, address: str = "", timeout_s: str = f"{START_S}") -> None:
    """Run one case.

    Raises:
        ValueError: there is no such case.
    """
    os.dup2(1, ANSWERS, inheritable=False)
    os.dup2(2, 1)
    wanted = job(**json.loads(sys.stdin.readline()))
    planned = plan(wanted)
    try:
        if case == "nodes":
            nodes(planned, folder)
        elif case == "probe":
            say(asyncio.run(probe(wanted, planned, folder, address)))
        elif case == "order":
            say({"orders": asyncio.run(order(planned, folder, address))})
        elif case == "hold":
            asyncio.run(hold(planned, folder, address, float(timeout_s)))
        else:
            raise ValueError(f"{case!r} is not a case; nodes, probe, order and hold are")
    except RuntimeFault as fault:
        say({"error": str(fault), "type": type(fault).__name__})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
