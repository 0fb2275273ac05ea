"""Plans for pictures, built without the planner: what each process uses is given directly."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rljob_api.placement.topology import ACCELERATOR
from rljob_api.planning.plan import PlacementMode, Plan, PlannedComponent, PlannedNode, PlannedProcess
from rljob_api.planning.sync_routes import sync_plan_of
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_runtime.plan_view import Route, routes_of

Spot = tuple[int, str | None, tuple[int, ...]]
"""Node rank, kind of hardware, indexes on the node."""


@dataclass(frozen=True)
class Case:
    plan: Plan
    routes: tuple[Route, ...] = ()


def nodes(*groups: tuple[str, int, int, tuple[tuple[str, int], ...]], resource: str = "nvidia.com/gpu") -> tuple[PlannedNode, ...]:
    """Groups as (name, nodes, devices of a node, other hardware of a node)."""
    result: list[PlannedNode] = []
    first = 0
    for name, number, devices, hardware in groups:
        for index in range(number):
            result.append(
                PlannedNode(
                    rank=len(result),
                    group=name,
                    index=index,
                    num_devices=devices,
                    device_resource=resource,
                    first_device=first,
                    hardware=hardware,
                )
            )
            first += devices
    return tuple(result)


def component(name: str, role: Role, of: Sequence[PlannedNode], spots: Iterable[Spot]) -> PlannedComponent:
    placed = list(spots)
    totals: dict[int, int] = {}
    for node, _, _ in placed:
        totals[node] = totals.get(node, 0) + 1
    seen: dict[int, int] = {}
    node_ranks = {node: index for index, node in enumerate(sorted(totals))}
    processes = []
    for rank, (node, kind, places) in enumerate(placed):
        local = places if kind == ACCELERATOR else ()
        processes.append(
            PlannedProcess(
                rank=rank,
                node_rank=node,
                local_devices=local,
                devices=tuple(of[node].first_device + place for place in local),
                local_rank=seen.get(node, 0),
                local_world_size=totals[node],
                node_group=of[node].group,
                placement_node_rank=node_ranks[node],
                hardware_type=kind,
                local_hardware=() if kind == ACCELERATOR else places,
            )
        )
        seen[node] = seen.get(node, 0) + 1
    return PlannedComponent(name=name, role=role, processes=tuple(processes), shares_devices_with=())


def plan_of(of: tuple[PlannedNode, ...], mode: PlacementMode, *components: PlannedComponent) -> Plan:
    devices = [set(c.devices) for c in components]
    shared = [tuple(o.name for j, o in enumerate(components) if j != i and devices[i] & devices[j]) for i in range(len(components))]
    with_sharing = tuple(
        PlannedComponent(name=c.name, role=c.role, processes=c.processes, shares_devices_with=names)
        for c, names in zip(components, shared, strict=True)
    )
    return Plan(nodes=of, components=with_sharing, mode=mode)


def gpus(node: int, *places: int) -> Spot:
    return node, ACCELERATOR, places


def with_routes(plan: Plan, backend: SyncBackend = SyncBackend.NCCL) -> Case:
    """With the sync routes from the first component to the second, a rollout whose engines are tensor parallel only."""
    trainer, rollout = plan.components[:2]
    sync = sync_plan_of(backend, trainer, rollout, tensor_parallel_size=len(rollout.processes[0].devices))
    return Case(plan, routes_of(sync, trainer.name, rollout.name))


def disaggregated() -> Case:
    of = nodes(("local", 1, 8, ()))
    return with_routes(
        plan_of(
            of,
            PlacementMode.DISAGGREGATED,
            component("actor_train", Role.TRAINER, of, [gpus(0, d) for d in range(4)]),
            component("actor_infer", Role.ROLLOUT, of, [gpus(0, 4, 5), gpus(0, 6, 7)]),
            component("reward", Role.REWARD, of, [(0, None, ())] * 4),
        )
    )


def collocated_strided() -> Case:
    of = nodes(("a800", 1, 8, ()))
    return with_routes(
        plan_of(
            of,
            PlacementMode.COLLOCATED,
            component("actor", Role.TRAINER, of, [gpus(0, d) for d in range(8)]),
            component("rollout", Role.ROLLOUT, of, [gpus(0, d, d + 4) for d in range(4)]),
            component("reference", Role.REFERENCE, of, [gpus(0, d) for d in range(8)]),
        )
    )


def hybrid() -> Case:
    of = nodes(("gpu", 2, 8, ()))
    return with_routes(
        plan_of(
            of,
            PlacementMode.HYBRID,
            component("actor_train", Role.TRAINER, of, [gpus(0, d) for d in range(8)]),
            component("actor_infer", Role.ROLLOUT, of, [gpus(n, d, d + 1) for n in range(2) for d in range(0, 8 - 2 * n, 2)]),
            component("reference", Role.REFERENCE, of, [gpus(0, d) for d in range(4) for _ in range(2)]),
        )
    )


def groups_and_robots() -> Case:
    of = nodes(("a800", 2, 4, ()), ("cpu", 3, 0, ()), ("robots", 2, 0, (("Franka", 2),)))
    return with_routes(
        plan_of(
            of,
            PlacementMode.DISAGGREGATED,
            component("actor", Role.TRAINER, of, [gpus(0, d) for d in range(4)]),
            component("rollout", Role.ROLLOUT, of, [gpus(1, 0, 1), gpus(1, 2, 3)]),
            component("simulator_with_a_rather_long_name", Role.ENVIRONMENT, of, [(2 + i % 3, None, ()) for i in range(7)]),
            component("arm", Role.ENVIRONMENT, of, [(5, "Franka", (0,)), (5, "Franka", (1,)), (6, "Franka", (0,))]),
        )
    )


def large(num_nodes: int = 64, per_node: int = 8) -> Case:
    of = nodes(("train", num_nodes // 2, per_node, ()), ("infer", num_nodes - num_nodes // 2, per_node, ()))
    half = num_nodes // 2
    engines = [gpus(n, *range(d, d + 4)) for n in range(half, num_nodes) for d in range(0, per_node, 4)]
    return with_routes(
        plan_of(
            of,
            PlacementMode.DISAGGREGATED,
            component("actor_train", Role.TRAINER, of, [gpus(n, d) for n in range(half) for d in range(per_node)]),
            component("actor_infer", Role.ROLLOUT, of, engines),
            component("reference", Role.REFERENCE, of, [gpus(n, d) for n in range(half) for d in range(per_node)]),
            component("reward", Role.REWARD, of, [(i % num_nodes, None, ()) for i in range(2 * num_nodes)]),
        ),
        SyncBackend.OBJECT_STORE,
    )


CASES = {
    "disaggregated-4-4": disaggregated,
    "collocated-strided": collocated_strided,
    "hybrid-overlap": hybrid,
    "groups-robots": groups_and_robots,
    "nodes-64": large,
}
