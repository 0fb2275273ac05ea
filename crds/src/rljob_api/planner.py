"""The one planner: spec in, plan out. Pure: no clock, no environment, no machine, no I/O.

::

    mode: Auto ─> rljob_api.auto makes it explicit
    nodeGroups ─> planned nodes ─> placement.Topology ─┐
    components ─> component_planner, one by one ───────┴─> processes ─> who shares devices, mode ─> Plan
                  (both grammars, placement.strategies)

Called by the CLI, the operator, the local run and the driver inside the pods, which all must agree.

Invariants: PLAN-PURE the same spec gives the same plan everywhere. UNIT-EXISTS no process on a device that does not exist,
none twice in a process. A process never spans two nodes. Time and memory grow with nodes + processes + their devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence, Set

from rljob_api import collector
from rljob_api.component_planner import MAX_PROCESSES, ComponentPlanner, engine_size
from rljob_api.errors import FieldError, SpecInvalidError, show
from rljob_api.placement.topology import ACCELERATOR, NO_ACCELERATOR, RESERVED_GROUPS, Node, Topology, topology
from rljob_api.placement.topology import NodeGroup as PlacementGroup
from rljob_api.plan import PlacementMode, Plan, PlannedComponent, PlannedNode, PlannedProcess, devices_of
from rljob_api.v1alpha1.components import Component, PlacementChoice, Role
from rljob_api.v1alpha1.nodes import Hardware, NodeGroup
from rljob_api.v1alpha1.rljob import RLJobSpec

__all__ = ["engine_size", "plan", "plan_or_errors"]

MAX_DEVICES = 131_072
"""Devices a job may ask for."""
MAX_NODES = 16_384
"""Nodes a job may ask for: more than three times what one Kubernetes cluster is supported with."""
ACCELERATOR_TYPES = {"nvidia.com/gpu": "NV_GPU", "amd.com/gpu": "AMD_GPU", "gpu.intel.com/xe": "INTEL_GPU", "huawei.com/Ascend910": "NPU"}
"""Make of the accelerators that a Kubernetes resource counts, by RLinf's names; others go by the resource's own name."""


def plan(spec: RLJobSpec) -> Plan:
    """Place every process of a job.

    Raises:
        SpecInvalidError: with every placement problem of the spec.
    """
    result = plan_or_errors(spec)
    if isinstance(result, Plan):
        return result
    raise SpecInvalidError(result)


def plan_or_errors(spec: RLJobSpec) -> Plan | list[FieldError]:
    """Like :func:`plan`, but returns the problems, in spec order."""
    errors = [*_group_errors(spec.node_groups), *_repeated([component.name for component in spec.components], "spec.components")]
    if any(_too_many(spec.node_groups)):
        return errors
    if any(component.placement.mode is PlacementChoice.AUTO for component in spec.components):
        from rljob_api import auto  # which plans with this module, and is seldom needed

        resolved = auto.resolve(spec)
        if isinstance(resolved, list):
            return [*errors, *resolved]
        spec = resolved
    with collector.paused():
        result = _planned(spec)
    return [*errors, *result] if isinstance(result, list) else errors or result


def _planned(spec: RLJobSpec) -> Plan | list[FieldError]:
    """The plan of a spec that says where everything goes, or what is wrong with its components."""
    nodes = planned_nodes(spec.node_groups)
    where = topology_of(spec.node_groups, nodes)
    planned: dict[int, tuple[PlannedProcess, ...]] = {}
    problems: dict[int, FieldError] = {}
    devices: dict[int, set[int]] = {}
    trainer: set[int] = set()
    total = 0
    for index in _trainers_first(spec.components):
        component_planner = ComponentPlanner(spec, index, where, nodes, trainer, MAX_PROCESSES - total)
        result = component_planner.run()
        if isinstance(result, FieldError):
            problems[index] = result
            if component_planner.too_many:
                break
            continue
        planned[index] = result
        devices[index] = devices_of(result)
        if spec.components[index].role is Role.TRAINER:
            trainer |= devices[index]
        total += len(result)
    if problems:
        return [problem for _, problem in sorted(problems.items())]
    in_order = range(len(spec.components))
    used = [devices[index] for index in in_order]
    num_devices = sum(node.num_devices for node in nodes)
    components = _with_sharing(spec.components, [planned[index] for index in in_order], used, num_devices)
    return Plan(nodes=nodes, components=components, mode=_mode(spec.components, used))


def planned_nodes(groups: Sequence[NodeGroup]) -> tuple[PlannedNode, ...]:
    """Nodes by rank: groups in written order, then index."""
    nodes: list[PlannedNode] = []
    first_device = 0
    for group in groups:
        pieces = Counter(config.node_rank for config in group.hardware.configs) if group.hardware else Counter[int]()
        for index in range(group.nodes):
            nodes.append(
                PlannedNode(
                    rank=len(nodes),
                    group=group.name,
                    index=index,
                    num_devices=group.devices_per_node,
                    device_resource=group.device_resource,
                    first_device=first_device,
                    hardware=((group.hardware.type, pieces[index]),) if group.hardware and pieces[index] else (),
                )
            )
            first_device += group.devices_per_node
    return tuple(nodes)


def topology_of(groups: Sequence[NodeGroup], nodes: Sequence[PlannedNode]) -> Topology:
    """What placements count on: the groups of a spec over its planned nodes."""
    machines = [
        Node(
            rank=node.rank,
            name=f"{node.group}[{node.index}]",
            num_accelerators=node.num_devices,
            accelerator_type=ACCELERATOR_TYPES.get(node.device_resource, node.device_resource) if node.num_devices else NO_ACCELERATOR,
            hardware=dict(node.hardware),
        )
        for node in nodes
    ]
    members: dict[str, list[int]] = {group.name: [] for group in groups}
    for node in nodes:
        members[node.group].append(node.rank)
    return topology(
        machines,
        [PlacementGroup(label=group.name, node_ranks=tuple(members[group.name]), hardware_type=_counted(group)) for group in groups],
    )


def _counted(group: NodeGroup) -> str | None:
    """What the ranks of a group count."""
    if group.ignore_hardware:
        return None
    if group.hardware is not None:
        return group.hardware.type
    return ACCELERATOR if group.devices_per_node else None


def _group_errors(groups: Sequence[NodeGroup]) -> Iterable[FieldError]:
    yield from _repeated([group.name for group in groups], "spec.nodeGroups")
    for index, group in enumerate(groups):
        path = f"spec.nodeGroups[{index}]"
        if group.name in RESERVED_GROUPS:
            problem = "is reserved: in placements, cluster means all nodes, and node counts nodes"
            yield FieldError(path=f"{path}.name", value=show(group.name), problem=problem, remedy="use another name")
        if group.hardware is None:
            continue
        if group.hardware.type == ACCELERATOR:
            problem = "accelerators are not listed one by one"
            yield FieldError(path=f"{path}.hardware.type", value=show(ACCELERATOR), problem=problem, remedy="set devicesPerNode instead")
        if group.ignore_hardware:
            problem = "has no effect, ignoreHardware makes ranks count nodes"
            yield FieldError(path=f"{path}.hardware", problem=problem, remedy="remove hardware or ignoreHardware")
        yield from _pieces(group, group.hardware, f"{path}.hardware")
    yield from _too_many(groups)


def _pieces(group: NodeGroup, hardware: Hardware, path: str) -> Iterable[FieldError]:
    """Problems of a group's other hardware."""
    first: dict[str, int] = {}
    for position, config in enumerate(hardware.configs):
        if config.node_rank >= group.nodes:
            yield FieldError(
                path=f"{path}.configs[{position}].nodeRank",
                value=show(config.node_rank),
                problem=f"is no node of {group.name}, which has {group.nodes}; node ranks of hardware count within the group",
                remedy=f"use 0 to {group.nodes - 1}, or add nodes",
            )
            continue
        same = first.setdefault(config.model_dump_json(), position)
        if same != position:
            problem = f"is the same piece as configs[{same}]"
            yield FieldError(path=f"{path}.configs[{position}]", problem=problem, remedy="list every piece once")


def _too_many(groups: Sequence[NodeGroup]) -> Iterable[FieldError]:
    num_nodes, num_devices = sum(group.nodes for group in groups), sum(group.nodes * group.devices_per_node for group in groups)
    if num_nodes > MAX_NODES:
        yield FieldError(path="spec.nodeGroups", problem=f"ask for {num_nodes} nodes, more than {MAX_NODES}", remedy="use fewer nodes")
    if num_devices > MAX_DEVICES:
        problem = f"ask for {num_devices} devices, more than {MAX_DEVICES}"
        yield FieldError(path="spec.nodeGroups", problem=problem, remedy="use fewer nodes or devicesPerNode")


def _repeated(names: Sequence[str], path: str) -> Iterable[FieldError]:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            yield FieldError(
                path=f"{path}[{index}].name",
                value=show(name),
                problem=f"is already the name of {path}[{first[name]}]",
                remedy="give every entry its own name",
            )
        first.setdefault(name, index)


def _trainers_first(components: Sequence[Component]) -> list[int]:
    """Indexes in planning order: how engines are laid out may depend on where the Trainer is."""
    return sorted(range(len(components)), key=lambda index: (components[index].role is not Role.TRAINER, index))


def _with_sharing(
    components: Sequence[Component], processes: Sequence[tuple[PlannedProcess, ...]], devices: Sequence[Set[int]], num_devices: int
) -> tuple[PlannedComponent, ...]:
    users = [0] * num_devices
    """Bit set of the components on every device."""
    for index, of_component in enumerate(devices):
        bit = 1 << index
        for device in of_component:
            users[device] |= bit
    neighbours = [0] * len(components)
    for bits in set(users):
        for index in range(len(components)):
            if bits >> index & 1:
                neighbours[index] |= bits & ~(1 << index)
    return tuple(
        PlannedComponent(
            name=component.name,
            role=component.role,
            processes=processes[index],
            shares_devices_with=tuple(other.name for j, other in enumerate(components) if neighbours[index] >> j & 1),
        )
        for index, component in enumerate(components)
    )


def _mode(components: Sequence[Component], devices: Sequence[Set[int]]) -> PlacementMode:
    trainer: set[int] = set()
    rollout: set[int] = set()
    for component, its_devices in zip(components, devices, strict=True):
        if component.role is Role.TRAINER:
            trainer |= its_devices
        elif component.role is Role.ROLLOUT:
            rollout |= its_devices
    if trainer.isdisjoint(rollout):
        return PlacementMode.DISAGGREGATED
    if trainer == rollout:
        return PlacementMode.COLLOCATED
    return PlacementMode.PARTIAL if trainer < rollout else PlacementMode.HYBRID
