"""Node groups: which machines a job asks for."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import (
    FreeForm,
    Label,
    LabelKey,
    LabelValue,
    PathText,
    Quantity,
    ShortText,
    SpecModel,
)
from rljob_api.v1alpha1.pods import AbsolutePath, EnvFromSource, EnvVar, NodeResources, ObjectName

Devices = Annotated[int, Field(ge=0, le=1024)]


class DeviceType(StrEnum):
    """What computes on the devices of a node group."""

    AUTO = "Auto"
    """CPU if deviceResource is cpu, otherwise CUDA."""
    CPU = "CPU"
    """The node's cores; the devices only count."""
    CUDA = "CUDA"
    """Accelerators that PyTorch addresses as cuda."""


class Head(SpecModel):
    """The pod of the Ray head and the driver, which coordinates; no worker runs on it."""

    resources: NodeResources = NodeResources()
    """CPU, memory, and shared memory of the pod. By default it requests 250m and 1Gi, so that it is not evicted first."""
    node_selector: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Kubernetes node labels the pod needs."""
    tolerations: tuple[FreeForm, ...] = Field(default=(), max_length=32)
    """Kubernetes tolerations of the pod."""
    affinity: FreeForm | None = None
    """Kubernetes affinity of the pod."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128)
    """Environment of head and driver."""
    env_from: tuple[EnvFromSource, ...] = Field(default=(), max_length=32)
    """Secrets and ConfigMaps whose keys become environment variables; env overrides them."""
    pod_template: FreeForm | None = None
    """Partial pod template, merged last over the generated one; the Ray container is called ray."""


class Storage(SpecModel):
    """A volume that head and all nodes share. It has the run folder: logs, metrics, checkpoints, the trained model."""

    claim_name: ObjectName
    """PersistentVolumeClaim; with several nodes its access mode must be ReadWriteMany unless all pods share one machine."""
    mount_path: AbsolutePath = "/storage"
    """Where it is mounted in every pod."""
    sub_path: Annotated[str, Field(max_length=1024)] = ""
    """Folder of the volume that is mounted; its root when empty."""


class HardwareConfig(SpecModel):
    """One piece of hardware that is not an accelerator, for example one robot."""

    node_rank: Annotated[int, Field(ge=0, le=65535)]
    """Rank of the node, within the group, that it is attached to."""
    parameters: FreeForm = Field(default={})
    """What the component's code needs to access it; passed on unchanged."""


class Hardware(SpecModel):
    """Hardware other than accelerators that a node group offers to placements."""

    type: Annotated[str, Field(min_length=1, max_length=64)]
    """Kind of hardware, for example Franka."""
    configs: tuple[HardwareConfig, ...] = Field(default=(), max_length=1024)
    """One entry per piece."""


class NodeGroup(SpecModel):
    """A set of identical nodes. Becomes one KubeRay worker group whose Ray nodes carry ray.io/node-group=<name>.

    Nodes are numbered through the groups in the order they are listed: rank = nodes of earlier groups + index.
    """

    name: Label
    """Unique name; also the value of the ray.io/node-group label."""
    nodes: Annotated[int, Field(ge=1, le=4096)] = 1
    """How many nodes (pods) the group has."""
    devices_per_node: Devices = 0
    """Devices of one node; 0 makes a CPU-only group."""
    device_resource: ShortText = "nvidia.com/gpu"
    """Kubernetes resource that counts devices, or "cpu": virtual devices that share the node's cores."""
    device_type: DeviceType = DeviceType.AUTO
    """What computes on the devices."""
    device_memory: Quantity | None = None
    """Memory of one device, for example "80Gi"; lets the planner check that everything fits before a device is allocated."""
    resources: NodeResources = NodeResources()
    """CPU, memory and shared memory of one node."""
    labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels for the Ray node and the pod."""
    node_selector: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Kubernetes node labels the pods need."""
    tolerations: tuple[FreeForm, ...] = Field(default=(), max_length=32)
    """Kubernetes tolerations of the pods."""
    affinity: FreeForm | None = None
    """Kubernetes affinity of the pods."""
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128)
    """Environment of every worker on these nodes."""
    env_from: tuple[EnvFromSource, ...] = Field(default=(), max_length=32)
    """Secrets and ConfigMaps whose keys become environment variables; env overrides them."""
    python_interpreter: PathText | None = None
    """Python interpreter of the workers on these nodes, a path inside their container; by default the one that runs Ray."""
    image: PathText | None = None
    """Container image of this group; by default the job's image."""
    runtime_class_name: ObjectName | None = None
    """Kubernetes RuntimeClass of the pods, for example nvidia."""
    pod_template: FreeForm | None = None
    """Partial pod template, merged last over the generated one; the Ray container is called ray."""
    hardware: Hardware | None = None
    """Robots and other hardware; placements of this group then count hardware units instead of devices."""
    ignore_hardware: bool = False
    """Count nodes even if the group has devices or hardware."""

    @property
    def on_accelerators(self) -> bool:
        """Whether devices have memory and kernels of their own, by CUDA or ROCm; else the node's cores compute."""
        if self.device_type is DeviceType.AUTO:
            return self.device_resource != "cpu"
        return self.device_type is DeviceType.CUDA
