"""The ``cluster`` section of an RLinf config, on given machines, as a :class:`~rljob_api.placement.topology.Topology`.

::

    config.cluster ── parse_cluster ─> ClusterConfig ─┐
                                                      ├─ build_cluster ─> Cluster(topology, machines, environments)
    machines ─────────────────────────────────────────┘
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.errors import PlacementError, did_you_mean, show
from rljob_api.placement.topology import NO_ACCELERATOR, Node, NodeGroup, Topology, default_hardware, topology
from rljob_convert.conformance.groups import EnvConfig, GroupConfig, parse_groups
from rljob_convert.conformance.hardware import count_units
from rljob_convert.conformance.limits import MAX_NODES, MAX_UNITS
from rljob_convert.conformance.node_ranks import Machine, rank_machines
from rljob_convert.conformance.values import check_fields, section

_READ_HERE = ("num_nodes", "component_placement", "node_groups", "profiling")
_READ_ELSEWHERE = (
    "auto_scheduler",
    "use_pre_process_policy",
    "use_wait_before_last_iter_policy",
    "recreate_nccl_groups",
    "tracer",
    "net_emulation",
)
"""Keys that other parts of RLinf 0.3.0 read off the section."""
_PROFILERS: Mapping[str, tuple[str, ...]] = {"nsight": ("options", "flags"), "rocprof_sys": ("args", "env")}
"""Profiling backends, with the fields only they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What the section says, before there are machines."""

    num_nodes: int
    component_placement: Mapping[str, object]
    """Components (names joined by commas) to rank maps; not checked yet."""
    groups: tuple[GroupConfig, ...] | None = None
    """None when there is no ``node_groups``."""
    unknown_keys: tuple[str, ...] = ()
    """Keys that RLinf ignores without a word (D20); see :meth:`check`."""

    @property
    def differences(self) -> tuple[str, ...]:
        """Intended differences from RLinf 0.3.0 without which the groups would be refused: D2, D10."""
        found = {difference for group in self.groups or () for difference in group.differences}
        return tuple(difference for difference in ("D2", "D10") if difference in found)

    def check(self) -> None:
        """Refuse what RLinf takes without a word; apart from parsing, so that what RLinf refuses is reported first.

        Raises:
            PlacementError: hardware given twice (D18), or an unknown key (D20).
        """
        for group in self.groups or ():
            if group.hardware is not None and group.hardware.refused is not None:
                raise group.hardware.refused
        known = (*_READ_HERE, *_READ_ELSEWHERE)
        for key in self.unknown_keys:
            near = did_you_mean(key, known)
            raise PlacementError("D20", f"cluster has the unknown key {show(key)}", near or "remove it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A configured cluster with its machines."""

    topology: Topology
    machines: tuple[Machine, ...]
    """By node rank."""
    groups: tuple[GroupConfig, ...]
    """Configured groups that have nodes, in their order."""
    differs_from_rlinf: bool
    """Whether RLinf 0.3.0 would give the machines other ranks (D13)."""

    def group_environments(self) -> dict[tuple[str, int], EnvConfig]:
        """Environment of workers by the group they are placed through and their node; nothing for ``cluster`` and ``node``."""
        return {(group.label, rank): config for group in self.groups for config in group.env_configs for rank in config.node_ranks}


def parse_cluster(value: object, default_num_nodes: int | None = None) -> ClusterConfig:
    """Read the section.

    Args:
        value: the section.
        default_num_nodes: number of nodes when the section has none; None makes it required.

    Raises:
        PlacementError: K1 to K14, D9.
    """
    entry = section(value, "cluster", "K2")
    if "component_placement" not in entry:
        raise PlacementError("K2", "cluster has no component_placement", "say where the components run")
    if "num_nodes" not in entry and default_num_nodes is None:
        raise PlacementError("K2", "cluster has no num_nodes", "say how many nodes there are")
    num_nodes = entry.get("num_nodes", default_num_nodes)
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int) or num_nodes < 1:
        raise PlacementError("K1", f"num_nodes is {show(num_nodes)}", "write a whole number of at least 1")
    if entry.get("profiling") is not None:
        _check_profiling(section(entry["profiling"], "profiling"))
    groups = entry.get("node_groups")
    placement = entry["component_placement"]
    return ClusterConfig(
        num_nodes=num_nodes,
        component_placement=section(placement, "component_placement", "K2"),
        groups=None if groups is None else parse_groups(groups, num_nodes),
        unknown_keys=tuple(str(key) for key in entry if key not in (*_READ_HERE, *_READ_ELSEWHERE)),
    )


def _check_profiling(entry: Mapping[str, object]) -> None:
    backend = entry.get("backend")
    if not isinstance(backend, str) or backend not in _PROFILERS:
        near = did_you_mean(str(backend), _PROFILERS)
        raise PlacementError("K3", f"profiling has the backend {show(backend)}", near or f"write {' or '.join(_PROFILERS)}")
    fields = ("enabled", "worker_groups", "steps", "output_dir", *_PROFILERS[backend])
    check_fields(entry, "profiling", required=("backend",), optional=fields)


def build_cluster(config: ClusterConfig, machines: Sequence[Machine], driver: int = 0) -> Cluster:
    """Give the machines their ranks, count their hardware, and form the groups.

    Args:
        config: the parsed section.
        machines: every machine that is there, in a stable order.
        driver: index of the machine that the driver runs on.

    Raises:
        PlacementError: N1 to N8, hardware variables that disagree (K11), or more than the limits allow (K1).
    """
    if len(machines) > MAX_NODES:
        raise PlacementError("K1", f"there are {len(machines)} machines, more than {MAX_NODES}", "use fewer")
    num_units = sum(machine.num_accelerators for machine in machines)
    if num_units > MAX_UNITS:
        raise PlacementError("K1", f"there are {num_units} accelerators, more than {MAX_UNITS}", "use fewer machines")
    ranked = rank_machines(machines, config.num_nodes, driver=driver, has_groups=config.groups is not None)
    used = ranked.machines
    groups = tuple(group for group in config.groups or () if group.node_ranks)
    hardware = count_units([group.hardware for group in groups if group.hardware], len(used), [machine.environment for machine in used])
    nodes = [_node(rank, machine, hardware[rank]) for rank, machine in enumerate(used)]
    label, uses = next(iter(Counter(group.label for group in groups).most_common(1)), ("", 1))
    if uses > 1:
        raise PlacementError("N7", f"{uses} node groups are called {show(label)}", "give every group its own label")
    return Cluster(
        topology=topology(nodes, [_group(group, nodes) for group in groups]),
        machines=used,
        groups=groups,
        differs_from_rlinf=ranked.differs_from_rlinf,
    )


def _node(rank: int, machine: Machine, hardware: Mapping[str, int]) -> Node:
    kind = machine.accelerator_type if machine.num_accelerators else NO_ACCELERATOR
    return Node(rank=rank, num_accelerators=machine.num_accelerators, accelerator_type=kind, hardware=hardware)


def _group(group: GroupConfig, nodes: Sequence[Node]) -> NodeGroup:
    hardware_type = group.hardware_type
    if hardware_type is None and not group.ignore_hardware:
        hardware_type = default_hardware(nodes[rank] for rank in group.node_ranks)
    return NodeGroup(label=group.label, node_ranks=group.node_ranks, hardware_type=hardware_type)
