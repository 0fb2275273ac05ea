"""The result of planning: which process runs on which node with which devices. Data only, same on every machine.

Read by the CLI (table), the operator (worker groups), the driver (placement group, actors) and the reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from rljob_api.v1alpha1.components import Role


class PlacementMode(StrEnum):
    """How the device sets of the Trainer and the Rollout relate."""

    COLLOCATED = "Collocated"
    """The same devices."""
    DISAGGREGATED = "Disaggregated"
    """No device in common."""
    PARTIAL = "Partial"
    """The Trainer's devices are some of the Rollout's: other engines go on while it trains."""
    HYBRID = "Hybrid"
    """Some devices in common, in any other way."""


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
    hardware: tuple[tuple[str, int], ...] = ()
    """Pieces of other hardware by kind."""


class PlannedProcess(NamedTuple):
    """One worker process of a component. Jobs have up to 10^5 of them, and a tuple is made in a quarter of a frozen dataclass's time."""

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
    node_group: str
    """Group, or reserved group, that its first unit was counted in."""
    placement_node_rank: int
    """Index of its node among the nodes that the component uses."""
    hardware_type: str | None
    """What it runs on: ``Accelerator``, a kind of other hardware such as ``Franka``, or None for a plain CPU process."""
    local_hardware: tuple[int, ...]
    """Pieces of other hardware it owns, as indexes among those of this kind on its node."""


def devices_of(processes: Iterable[PlannedProcess]) -> set[int]:
    """Global ranks of all devices that some processes use."""
    return set(chain.from_iterable(map(attrgetter("devices"), processes)))


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
        return tuple(sorted(self.device_set()))

    def device_set(self) -> set[int]:
        """The same without order, which takes less time."""
        return devices_of(self.processes)


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
