"""The nodes of a job by rank, what placements count on them, and what is wrong with the node groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rljob_api.errors import FieldError, show
from rljob_api.placement.topology import ACCELERATOR, NO_ACCELERATOR, RESERVED_GROUPS, Node, Topology, topology
from rljob_api.placement.topology import NodeGroup as PlacementGroup
from rljob_api.planning.plan import PlannedNode
from rljob_api.v1alpha1.nodes import Hardware, NodeGroup

MAX_DEVICES = 131_072
"""Devices a job may ask for."""
MAX_NODES = 16_384
"""Nodes a job may ask for: more than three times what one Kubernetes cluster is supported with."""
ACCELERATOR_TYPES = {"nvidia.com/gpu": "NV_GPU", "amd.com/gpu": "AMD_GPU", "gpu.intel.com/xe": "INTEL_GPU", "huawei.com/Ascend910": "NPU"}
"""Accelerator type that a Kubernetes resource counts, by RLinf's names; others go by the resource's own name."""


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


def group_errors(groups: Sequence[NodeGroup]) -> Iterable[FieldError]:
    """Problems of the node groups by themselves."""
    yield from repeated([group.name for group in groups], "spec.nodeGroups")
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
    yield from too_many(groups)


def _pieces(group: NodeGroup, hardware: Hardware, path: str) -> Iterable[FieldError]:
    """Problems of a group's other hardware."""
    first: dict[str, int] = {}
    for position, config in enumerate(hardware.configs):
        if config.node_rank >= group.nodes:
            yield FieldError(
                path=f"{path}.configs[{position}].nodeRank",
                value=show(config.node_rank),
                problem=f"is not a node of {group.name}, which has {group.nodes}; node ranks of hardware count within the group",
                remedy=f"use 0 to {group.nodes - 1}, or add nodes",
            )
            continue
        same = first.setdefault(config.model_dump_json(), position)
        if same != position:
            problem = f"is the same piece as configs[{same}]"
            yield FieldError(path=f"{path}.configs[{position}]", problem=problem, remedy="list every piece once")


def too_many(groups: Sequence[NodeGroup]) -> Iterable[FieldError]:
    """The problem of more nodes or devices than can be planned: nothing else is looked at then."""
    num_nodes, num_devices = sum(group.nodes for group in groups), sum(group.nodes * group.devices_per_node for group in groups)
    if num_nodes > MAX_NODES:
        yield FieldError(path="spec.nodeGroups", problem=f"ask for {num_nodes} nodes, more than {MAX_NODES}", remedy="use fewer nodes")
    if num_devices > MAX_DEVICES:
        problem = f"ask for {num_devices} devices, more than {MAX_DEVICES}"
        yield FieldError(path="spec.nodeGroups", problem=problem, remedy="use fewer nodes or devicesPerNode")


def repeated(names: Sequence[str], path: str) -> Iterable[FieldError]:
    """Problems of names that occur twice in a list of the spec."""
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
