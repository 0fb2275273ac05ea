"""The result of planning: which process runs on which node with which devices. Data only, same on every machine.

Read by the CLI (table), the operator (worker groups), the driver (placement group, actors) and the reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rljob_api.v1alpha1.components import Role


class PlacementMode(StrEnum):
    """How the device sets of the Trainer and the Rollout relate."""

    COLLOCATED = "Collocated"
    """The same devices."""
    DISAGGREGATED = "Disaggregated"
    """No device in common."""
    HYBRID = "Hybrid"
    """Some devices in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNode:
    """One Ray node (pod). The head has no rank and is not listed."""

    rank: int
    """Nodes of earlier groups plus index."""
    group: str
    index: int
    """Index within its group."""
    num_devices: int
    device_resource: str
    first_device: int
    """Global rank of its first device; devices are counted through the nodes by rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One worker process of a component."""

    rank: int
    """0 .. world size - 1 within its component."""
    node_rank: int
    local_devices: tuple[int, ...]
    """Device indexes on its node; empty for CPU-only workers."""
    devices: tuple[int, ...]
    """The same devices as global ranks."""
    local_rank: int
    """Index among the component's processes on this node."""
    local_world_size: int
    """Processes of the component on this node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedComponent:
    """All processes of a component."""

    name: str
    role: Role
    processes: tuple[PlannedProcess, ...]
    shares_devices_with: tuple[str, ...]
    """Names of components that have a device in common with this one, in spec order."""

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return len(self.processes)

    @property
    def devices(self) -> tuple[int, ...]:
        """Global ranks of all devices it uses, ascending, without repetition."""
        return tuple(sorted({d for p in self.processes for d in p.devices}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Nodes and processes of a job."""

    nodes: tuple[PlannedNode, ...]
    components: tuple[PlannedComponent, ...]
    mode: PlacementMode

    def component(self, name: str) -> PlannedComponent:
        """The component of that name; KeyError when there is none."""
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)

    def with_role(self, role: Role) -> tuple[PlannedComponent, ...]:
        """Components of a role, in spec order."""
        return tuple(c for c in self.components if c.role is role)
