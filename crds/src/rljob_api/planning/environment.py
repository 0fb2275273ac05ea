"""What a worker process finds in its environment about its own place. Pure; ``docs/placement.md`` shows the table to users.

Names are torchrun's and RLinf 0.3.0's where code in the field reads them, ``RLJOB_*`` for the rest. A process never sees devices
that are not its own, so that ``LOCAL_RANK``, the index of the device to use among the visible ones, is 0 in every process, as in
RLinf with isolation; its index among the processes of its node is ``NODE_LOCAL_RANK``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from rljob_api import naming
from rljob_api.placement.topology import NO_ACCELERATOR
from rljob_api.planning.nodes import ACCELERATOR_TYPES
from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.v1alpha1.nodes import DeviceType, NodeGroup
from rljob_api.v1alpha1.pods import EnvVar
from rljob_api.v1alpha1.rljob import RLJobSpec

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""What CUDA and ROCm builds of PyTorch let a process see; empty hides all devices."""
VARIABLES: Mapping[str, str] = {
    "RANK": "rank of the process in its component",
    "WORLD_SIZE": "processes of the component",
    "LOCAL_RANK": "always 0: the first of the visible devices is the process's own",
    "LOCAL_WORLD_SIZE": "always 1: no other process uses the visible devices as its LOCAL_RANK",
    "NODE_RANK": "index of the node among the nodes that the component uses",
    "CLUSTER_NODE_RANK": "rank of the node in the job",
    "NODE_LOCAL_RANK": "index of the process among the component's processes on its node",
    "NODE_LOCAL_WORLD_SIZE": "processes of the component on the node",
    "NODE_GROUP_LABEL": "node group that the placement counted the process in; may be the reserved cluster or node",
    "ACCELERATOR_TYPE": "accelerator type of the node, for example NV_GPU; NO_ACCEL without any",
    "LOCAL_ACCELERATOR_RANK": "index on the node of the first device of the process, -1 without one",
    "LOCAL_HARDWARE_RANKS": "indexes on the node of the devices or robots of the process, with commas; empty without any",
    "VISIBLE_DEVICES": "indexes on the node of the devices of the process, with commas; empty without any",
    "ISOLATE_ACCELERATOR": "always 1: other devices are hidden",
    CUDA_VISIBLE_DEVICES: "the same devices by the numbers that the pod was given them under; empty without any, or when deviceType is CPU",
    "RLJOB_COMPONENT": "name of the component",
    "RLJOB_ROLE": "its role, for example Rollout",
    "RLJOB_WORKER": "name of the process, its log and its actor: <component>-<rank>",
    "RLJOB_NODE_GROUP": "node group of the node",
    "RLJOB_HARDWARE_TYPE": "what the process runs on: Accelerator, the hardware.type of its group such as Franka, or empty",
    "RLJOB_HARDWARE": "parameters of the robots of the process, a JSON list in the order of LOCAL_HARDWARE_RANKS",
}
"""Every variable that the system sets about a place, and what it says. Users cannot set them."""


def worker_environment(spec: RLJobSpec, plan: Plan, component: PlannedComponent, process: PlannedProcess) -> dict[str, str]:
    """Variables of one worker: its node group's, over them its component's, over them the system's :data:`VARIABLES`.

    ``CUDA_VISIBLE_DEVICES`` has indexes on the node; who starts the process translates them where the node has numbers of its own.
    Variables that come from elsewhere, such as a Secret, are left out: they are in the environment of the pod.
    """
    group = node_group(spec, plan, process)
    own = next(c for c in spec.components if c.name == component.name)
    return {**_literal(group.env), **_literal(own.env), **_system(group, plan, component, process)}


def group_environment(spec: RLJobSpec, group: str) -> dict[str, str]:
    """Variables that every process on a group's nodes gets, without those from a Secret."""
    return _literal(next(each.env for each in spec.node_groups if each.name == group))


def node_group(spec: RLJobSpec, plan: Plan, process: PlannedProcess) -> NodeGroup:
    """The node group whose node a process runs on, whichever group its placement named."""
    name = plan.nodes[process.node_rank].group
    return next(group for group in spec.node_groups if group.name == name)


def device_type(group: NodeGroup) -> DeviceType:
    """What computes on a group's devices: CPU or CUDA, never Auto."""
    if group.device_type is not DeviceType.AUTO:
        return group.device_type
    return DeviceType.CPU if group.device_resource == "cpu" else DeviceType.CUDA


def hardware_parameters(group: NodeGroup, node_index: int, pieces: Sequence[int]) -> list[Mapping[str, object]]:
    """Parameters of some pieces of a node, which are numbered in the order in which the group lists them."""
    if group.hardware is None or not pieces:
        return []
    on_node = [config.parameters for config in group.hardware.configs if config.node_rank == node_index]
    return [on_node[piece] for piece in pieces]


def _system(group: NodeGroup, plan: Plan, component: PlannedComponent, process: PlannedProcess) -> dict[str, str]:
    node = plan.nodes[process.node_rank]
    devices = _joined(process.local_devices)
    accelerator_type = ACCELERATOR_TYPES.get(node.device_resource, node.device_resource)
    return {
        "RANK": str(process.rank),
        "WORLD_SIZE": str(component.world_size),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": str(process.placement_node_rank),
        "CLUSTER_NODE_RANK": str(process.node_rank),
        "NODE_LOCAL_RANK": str(process.local_rank),
        "NODE_LOCAL_WORLD_SIZE": str(process.local_world_size),
        "NODE_GROUP_LABEL": process.node_group,
        "ACCELERATOR_TYPE": accelerator_type if node.num_devices else NO_ACCELERATOR,
        "LOCAL_ACCELERATOR_RANK": str(process.local_devices[0] if process.local_devices else -1),
        "LOCAL_HARDWARE_RANKS": devices or _joined(process.local_hardware),
        "VISIBLE_DEVICES": devices,
        "ISOLATE_ACCELERATOR": "1",
        CUDA_VISIBLE_DEVICES: devices if device_type(group) is DeviceType.CUDA else "",
        "RLJOB_COMPONENT": component.name,
        "RLJOB_ROLE": component.role.value,
        "RLJOB_WORKER": naming.worker_name(component.name, process.rank),
        "RLJOB_NODE_GROUP": node.group,
        "RLJOB_HARDWARE_TYPE": process.hardware_type or "",
        "RLJOB_HARDWARE": json.dumps(hardware_parameters(group, node.index, process.local_hardware), allow_nan=False),
    }


def _joined(indexes: Iterable[int]) -> str:
    return ",".join(map(str, indexes))


def _literal(variables: Iterable[EnvVar]) -> dict[str, str]:
    return {variable.name: variable.value for variable in variables if variable.value is not None}
