"""Where one process runs: the result of every placement strategy. Fields as RLinf 0.3.0 documents them ("Placement Metadata")."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The place of one worker process."""

    rank: int
    """Rank of the process within its component, from 0."""
    cluster_node_rank: int
    """Rank of its node in the cluster."""
    placement_node_rank: int
    """Index of its node among the nodes that the component uses, from 0 without gaps."""
    local_accelerator_rank: int
    """Index on the node of the first accelerator it owns; -1 when it owns none."""
    accelerator_type: str
    """Type of the node's accelerators, ``NO_ACCEL`` without any."""
    local_rank: int
    """Index of the process among the component's processes on its node."""
    local_world_size: int
    """The component's processes on its node."""
    visible_accelerators: tuple[str, ...]
    """What the process sees: its own accelerators, or all of the node where isolation is off."""
    isolate_accelerator: bool
    """Whether accelerators that it does not own are hidden from it."""
    local_hardware_ranks: tuple[int, ...]
    """Indexes on the node, ascending, of the units it owns; empty when ranks count nodes."""
    node_group_label: str
    """Group of its first unit."""
    hardware_type: str | None
    """Kind of its units, for example ``Accelerator`` or ``Franka``; None when ranks count nodes."""
    units: tuple[int, ...]
    """Its resource ranks within the selection, ascending."""
