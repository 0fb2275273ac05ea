"""Whether the nodes of a running Ray cluster are those of a plan, and the wait until they are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from rljob_api.naming import HARDWARE_RESOURCE, NODE_GROUP_LABEL, NODE_RANK_LABEL, ray_resource
from rljob_api.planning.plan import Plan, PlannedNode
from rljob_runtime.errors import ClusterError

SAY_EVERY_S = 15.0
"""How often a wait for nodes, or for their devices, reports what is missing."""
HEAD_RESOURCE = "node:__internal_head__"
"""Only Ray's head offers it; one without a rank is not a node of the plan."""


async def wait_for_nodes(plan: Plan, deadline: float, notify: Callable[[str], None]) -> None:
    """Wait until the nodes are the planned ones; ``notify`` is called now and then with what is wrong.

    Raises:
        ClusterError: at the deadline, with everything that is still wrong.
    """
    say_at = time.monotonic() + SAY_EVERY_S
    while problems := missing_nodes(plan, ray.nodes()):
        now = time.monotonic()
        if now >= deadline:
            raise ClusterError(
                f"the Ray cluster does not match the plan within the time that spec.startupDeadlineSeconds sets: {'; '.join(problems)}"
            )
        if now >= say_at:
            say_at = now + SAY_EVERY_S
            notify(f"waiting for the planned nodes, {deadline - now:.0f} s left: {'; '.join(problems)}")
        await asyncio.sleep(0.1)


def missing_nodes(plan: Plan, ray_nodes: Sequence[dict[str, Any]]) -> list[str]:
    """How ``ray.nodes()`` differs from the plan, one sentence each; empty when exactly the planned nodes are there.

    Two nodes of one rank, or one too many, are mostly a pod that was replaced and is not yet known to be gone: worth waiting for.
    """
    alive = [n for n in ray_nodes if n["Alive"] and (HEAD_RESOURCE not in n["Resources"] or NODE_RANK_LABEL in n["Labels"])]
    by_rank: dict[str, list[dict[str, Any]]] = {}
    for found in alive:
        by_rank.setdefault(found["Labels"].get(NODE_RANK_LABEL, ""), []).append(found)
    problems = [problem for node in plan.nodes for problem in _node_problems(node, by_rank.pop(str(node.rank), []))]
    for rank, surplus in sorted(by_rank.items()):
        where = ", ".join(_address(n) for n in surplus)
        what = (
            f"carries {NODE_RANK_LABEL}={rank}, planned are 0 to {len(plan.nodes) - 1}" if rank else f"carries no label {NODE_RANK_LABEL}"
        )
        problems.append(f"the node at {where} {what}")
    return problems


def _node_problems(node: PlannedNode, found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What is wrong with the nodes that claim a planned node's rank."""
    if not found:
        yield f"node {node.rank} (group {node.group}, index {node.index}) has not joined"
        return
    if len(found) > 1:
        yield f"node {node.rank} (group {node.group}) is there {len(found)} times: {', '.join(_address(n) for n in found)}"
    for one in found:
        group = one["Labels"].get(NODE_GROUP_LABEL)
        if group != node.group:
            yield f"node {node.rank} at {_address(one)} is labeled {NODE_GROUP_LABEL}={group}, planned {node.group}"
        have = one["Resources"].get(ray_resource(node.device_resource), 0)
        if have != node.num_devices:
            yield f"node {node.rank} (group {node.group}) offers {have:g} {node.device_resource}, planned {node.num_devices}"
        if node.hardware and not one["Resources"].get(HARDWARE_RESOURCE):
            pieces = ", ".join(f"{count} {kind}" for kind, count in node.hardware)
            yield f"node {node.rank} (group {node.group}) offers no {HARDWARE_RESOURCE}, which stands for its {pieces}"


def _address(ray_node: dict[str, Any]) -> str:
    return str(ray_node.get("NodeManagerAddress", "an unknown address"))
