"""Environment that RLinf 0.3.0 gives a worker process (``rlinf/scheduler/worker/worker_group.py``), from its placement."""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.placement.topology import NO_ACCELERATOR
from rljob_convert.conformance.node_ranks import Machine
from rljob_convert.placement.metadata import Placement

_VISIBLE: Mapping[str, tuple[str, ...]] = {
    "NV_GPU": ("CUDA_VISIBLE_DEVICES",),
    "AMD_GPU": ("HIP_VISIBLE_DEVICES",),
    "NPU": ("ASCEND_RT_VISIBLE_DEVICES",),
    "INTEL_GPU": ("ONEAPI_DEVICE_SELECTOR",),
    "MUSA_GPU": ("MUSA_VISIBLE_DEVICES",),
}
"""Variables that list the devices a process may see, by accelerator type."""
_ALSO_UNSET_BY_RAY: Mapping[str, tuple[str, ...]] = {"AMD_GPU": ("ROCR_VISIBLE_DEVICES",)}
"""Further variables that Ray must leave alone."""


def worker_environment(placement: Placement, machine: Machine, *, group_name: str, world_size: int, master_address: str) -> dict[str, str]:
    """Variables of one worker.

    Args:
        placement: of the worker.
        machine: its node.
        group_name: of its worker group.
        world_size: processes of its component.
        master_address: IP of the node of rank 0.
    """
    has_accelerators = placement.accelerator_type != NO_ACCELERATOR
    model = f"{placement.accelerator_type}:{machine.accelerator_model}" if has_accelerators else ""
    environment = {
        "GROUP_NAME": group_name,
        "WORKER_NAME": f"{group_name}:{placement.rank}",
        "MASTER_ADDR": master_address,
        "WORLD_SIZE": str(world_size),
        "RANK": str(placement.rank),
        "NODE_RANK": str(placement.placement_node_rank),
        "CLUSTER_NODE_RANK": str(placement.cluster_node_rank),
        "LOCAL_ACCELERATOR_RANK": str(placement.local_accelerator_rank),
        "NODE_LOCAL_RANK": str(placement.local_rank),
        "NODE_LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "RAY_ACTOR": "1",
        "CLUSTER_NAMESPACE": "RLinf",
        "CATCH_SYSTEM_FAILURE": "0",
        "VISIBLE_DEVICES": ",".join(placement.visible_accelerators),
        "ACCELERATOR_TYPE": placement.accelerator_type,
        "ACCELERATOR_MODEL": model,
        "ISOLATE_ACCELERATOR": "1" if placement.isolate_accelerator else "0",
        "LOCAL_HARDWARE_RANKS": ",".join(map(str, placement.local_hardware_ranks)),
        "NODE_GROUP_LABEL": placement.node_group_label,
    }
    return environment | accelerator_environment(placement.accelerator_type, placement.visible_accelerators)


def accelerator_environment(accelerator_type: str, visible: tuple[str, ...]) -> dict[str, str]:
    """Variables that limit a process to the accelerators it may see; empty where a node has none."""
    names = _VISIBLE.get(accelerator_type, ())
    environment = dict.fromkeys(names, ",".join(visible))
    for name in (*names, *_ALSO_UNSET_BY_RAY.get(accelerator_type, ())):
        environment[f"RAY_EXPERIMENTAL_NOSET_{name}"] = "1"
    if accelerator_type == "NV_GPU":
        if visible:
            environment["MUJOCO_EGL_DEVICE_ID"] = visible[0]
        environment |= {"NCCL_CUMEM_ENABLE": "0", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    return environment
