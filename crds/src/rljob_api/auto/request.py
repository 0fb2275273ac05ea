"""What a choice has to decide: roles without devices, what they may use, and what the others hold already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_api.auto.cost import CPU_SPEED
from rljob_api.auto.supply import FreeGroup
from rljob_api.errors import FieldError, PlacementError, did_you_mean, show
from rljob_api.placement.assignment import MAX_PROCESSES
from rljob_api.placement.topology import CLUSTER, NODE
from rljob_api.planning.component import ComponentPlanner
from rljob_api.planning.nodes import planned_nodes, topology_of
from rljob_api.planning.plan import PlannedNode, PlannedProcess
from rljob_api.roles import AUTO_ROLES, ROLE_OF_PHASE, TRAITS, AutoPhase
from rljob_api.v1alpha1.components import Component, Engine, PlacementChoice
from rljob_api.v1alpha1.nodes import NodeGroup
from rljob_api.v1alpha1.operations import Residency
from rljob_api.v1alpha1.rljob import RLJobSpec

CPU_RESOURCE = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Components of one role that the spec places itself."""

    index: int
    """Index of the first of them in spec.components."""
    num_processes: int
    num_devices: int
    resource: str
    """What the devices of the first process are."""
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A spec with roles to place, read once."""

    spec: RLJobSpec
    groups: tuple[FreeGroup, ...]
    """Groups whose ranks count devices, in spec order."""
    auto: Mapping[AutoPhase, int]
    """Index of the component to place, by the phase of its role."""
    allowed: Mapping[AutoPhase, tuple[FreeGroup, ...]]
    """Groups each of them may use, in spec order."""
    fixed: Mapping[AutoPhase, Fixed]

    @property
    def engine(self) -> Engine:
        """Engine of the Rollout to place, else of the first Rollout."""
        rollouts = [c for c in self.spec.components if TRAITS[c.role].receives_weights]
        index = self.auto.get(AutoPhase.GENERATE)
        chosen = self.spec.components[index] if index is not None else rollouts[0] if rollouts else None
        return chosen.engine or Engine() if chosen is not None else Engine()

    def speed(self, resource: str) -> float:
        """Speed of one device: against an accelerator, or, with measured times, the fastest kind that the job has."""
        own = CPU_SPEED if resource == CPU_RESOURCE else 1.0
        return own if self.spec.measured is None else own / self.fastest

    @property
    def fastest(self) -> float:
        """Speed of the fastest kind of device that the job has, against an accelerator."""
        return 1.0 if any(group.resource != CPU_RESOURCE for group in self.groups) else CPU_SPEED

    @property
    def room_is_known(self) -> bool:
        """Whether it is known that what shares devices fits, or turns out not to: it switches, or the spec says all sizes.

        A node group without accelerators divides the node's memory.
        """
        if self.spec.offload.residency is Residency.SWITCHING:
            return True
        groups = [group for group in self.spec.node_groups if group.devices_per_node]
        limits = [group.resources.memory_limit if group.device_resource == CPU_RESOURCE else group.device_memory for group in groups]
        return self.spec.model.parameter_count is not None and None not in limits


def is_auto(spec: RLJobSpec) -> bool:
    """Whether any component leaves its placement to the planner."""
    return any(component.placement.mode is PlacementChoice.AUTO for component in spec.components)


def read(spec: RLJobSpec) -> Request | list[FieldError]:
    """What there is to decide, or the problems of the spec that prevent a choice, in spec order."""
    nodes = planned_nodes(spec.node_groups)
    placed, errors = _placed(spec, nodes)
    auto: dict[AutoPhase, int] = {}
    for index, component in enumerate(spec.components):
        if component.placement.mode is PlacementChoice.AUTO:
            problem = _misuse(component, index, auto)
            if problem is not None:
                errors[index] = problem
            phase = TRAITS[component.role].auto_phase
            if phase is not None:
                auto.setdefault(phase, index)
    groups = tuple(_free_groups(spec.node_groups, nodes, placed))
    allowed: dict[AutoPhase, tuple[FreeGroup, ...]] = {}
    for phase, index in auto.items():
        if index not in errors:
            try:
                allowed[phase] = _allowed(spec.components[index], groups, [group.name for group in spec.node_groups])
            except PlacementError as error:
                errors[index] = _group_error(spec.components[index], index, error)
    if errors:
        return [error for _, error in sorted(errors.items())]
    return Request(spec=spec, groups=groups, auto=auto, allowed=allowed, fixed=_fixed(spec, nodes, placed))


def _placed(spec: RLJobSpec, nodes: Sequence[PlannedNode]) -> tuple[dict[int, tuple[PlannedProcess, ...]], dict[int, FieldError]]:
    """Processes of explicit components, and problems, by component. CPU workers hold no device and are left to the planner."""
    where = topology_of(spec.node_groups, nodes)
    placed: dict[int, tuple[PlannedProcess, ...]] = {}
    errors: dict[int, FieldError] = {}
    left = MAX_PROCESSES
    for index, component in enumerate(spec.components):
        if component.placement.mode is PlacementChoice.AUTO or component.placement.workers is not None:
            continue
        component_planner = ComponentPlanner(spec, index, where, nodes, frozenset(), left)
        result = component_planner.run()
        if isinstance(result, FieldError):
            errors[index] = result
            if component_planner.too_many:
                break
        else:
            placed[index] = result
            left -= len(result)
    return placed, errors


def _misuse(component: Component, index: int, earlier: Mapping[AutoPhase, int]) -> FieldError | None:
    """What mode Auto does not go with."""
    path, placement = f"spec.components[{index}].placement", component.placement
    given = {
        "ranks": placement.ranks,
        "deviceMapping": placement.device_mapping,
        "devicesPerWorker": placement.devices_per_worker,
        "workers": placement.workers,
    }
    used = [name for name, value in given.items() if value is not None]
    auto, role = show(PlacementChoice.AUTO.value), component.role
    phase = TRAITS[role].auto_phase
    if phase is None:
        problem = f"chooses devices for a {', '.join(AUTO_ROLES[:-1])} or {AUTO_ROLES[-1]}, not for a {role}"
        remedy = "give workers" if TRAITS[role].takes_workers else "give ranks or deviceMapping"
        return FieldError(path=f"{path}.mode", value=auto, problem=problem, remedy=remedy)
    if used:
        problem = f"contradicts {' and '.join(used)}, which the planner would choose"
        return FieldError(path=f"{path}.mode", value=auto, problem=problem, remedy=f"remove {' and '.join(used)}, or mode")
    if phase in earlier:
        problem = f"is given to a second {role}; the planner chooses devices for one component of a role"
        return FieldError(path=f"{path}.mode", value=auto, problem=problem, remedy="give this one ranks or deviceMapping")
    return None


def _allowed(component: Component, groups: Sequence[FreeGroup], names: Sequence[str]) -> tuple[FreeGroup, ...]:
    """The groups a component may use; the checks are those of written ranks.

    Raises:
        PlacementError: a group is unknown, named twice, or has no devices to choose.
    """
    labels = component.placement.node_groups
    for position, label in enumerate(labels):
        if label == NODE:
            raise PlacementError("G1", "node counts nodes, a choice is among devices", "name groups with devices")
        if label != CLUSTER and label not in names:
            near = did_you_mean(label, names)
            raise PlacementError(
                "G1", f"no node group is called {show(label)}, there are {', '.join(names)}", near or "name an existing group"
            )
        if label in labels[:position] or (label == CLUSTER and len(labels) > 1):
            raise PlacementError("D6", f"{show(label)} names devices twice", "name groups that have no node in common, each once")
    is_open = not labels or labels == (CLUSTER,)
    chosen = tuple(group for group in groups if is_open or group.name in labels)
    without = [label for label in labels if not is_open and label not in {group.name for group in chosen}]
    if without or not chosen:
        what = ", ".join(map(show, without)) if without else "the job"
        raise PlacementError("G1", f"a {component.role} needs devices, but {what} has none to choose", "choose groups with devicesPerNode")
    return chosen


def _group_error(component: Component, index: int, error: PlacementError) -> FieldError:
    labels = list(component.placement.node_groups)
    path = f"spec.components[{index}].placement"
    return FieldError(
        path=f"{path}.nodeGroups" if labels else path, value=show(labels) if labels else None, problem=error.problem, remedy=error.remedy
    )


def _free_groups(
    groups: Sequence[NodeGroup], nodes: Sequence[PlannedNode], placed: Mapping[int, Sequence[PlannedProcess]]
) -> Iterator[FreeGroup]:
    """Groups whose ranks count devices, without what explicit components hold."""
    held: dict[int, set[int]] = {}
    for processes in placed.values():
        for process in processes:
            if process.local_devices:
                held.setdefault(process.node_rank, set()).update(process.local_devices)
    first_node = 0
    for index, group in enumerate(groups):
        if group.devices_per_node and not group.ignore_hardware and group.hardware is None:
            there = range(first_node, first_node + group.nodes)
            yield FreeGroup(
                index=index,
                name=group.name,
                first_node=first_node,
                nodes=group.nodes,
                devices_per_node=group.devices_per_node,
                resource=group.device_resource,
                taken={rank - first_node: frozenset(devices) for rank, devices in held.items() if rank in there},
            )
        first_node += group.nodes


def _fixed(spec: RLJobSpec, nodes: Sequence[PlannedNode], placed: Mapping[int, Sequence[PlannedProcess]]) -> Mapping[AutoPhase, Fixed]:
    found: dict[AutoPhase, Fixed] = {}
    for phase, role in ROLE_OF_PHASE.items():
        indexes = [index for index in placed if spec.components[index].role is role]
        processes = [process for index in indexes for process in placed[index]]
        if processes:
            found[phase] = Fixed(
                index=indexes[0],
                num_processes=len(processes),
                num_devices=sum(len(process.devices) for process in processes),
                resource=nodes[processes[0].node_rank].device_resource,
                nodes=frozenset(process.node_rank for process in processes),
            )
    return found
