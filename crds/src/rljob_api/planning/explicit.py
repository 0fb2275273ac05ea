"""Plans a spec in which every component says where it runs; :mod:`rljob_api.planner` makes specs with ``mode: Auto`` so first.

::

    nodeGroups ─> planning.nodes ─> planned nodes ─> placement.Topology ─┐
    components ─> planning.component, one by one ────────────────────────┴─> processes ─> who shares devices, mode ─> Plan
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from rljob_api import collector
from rljob_api.errors import FieldError
from rljob_api.planning.component import MAX_PROCESSES, ComponentPlanner
from rljob_api.planning.nodes import group_errors, planned_nodes, repeated, too_many, topology_of
from rljob_api.planning.plan import PlacementMode, Plan, PlannedComponent, PlannedProcess, devices_of
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import Component
from rljob_api.v1alpha1.rljob import RLJobSpec


def plan_or_errors(spec: RLJobSpec) -> Plan | list[FieldError]:
    """The plan of a spec without ``mode: Auto``, or its problems in spec order."""
    errors = spec_errors(spec)
    if any(too_many(spec.node_groups)):
        return errors
    with collector.paused():
        result = _planned(spec)
    return [*errors, *result] if isinstance(result, list) else errors or result


def spec_errors(spec: RLJobSpec) -> list[FieldError]:
    """Problems that have nothing to do with where components run."""
    return [*group_errors(spec.node_groups), *repeated([component.name for component in spec.components], "spec.components")]


def _planned(spec: RLJobSpec) -> Plan | list[FieldError]:
    """The plan, or what is wrong with the components."""
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
        if TRAITS[spec.components[index].role].publishes_weights:
            trainer |= devices[index]
        total += len(result)
    if problems:
        return [problem for _, problem in sorted(problems.items())]
    in_order = range(len(spec.components))
    used = [devices[index] for index in in_order]
    num_devices = sum(node.num_devices for node in nodes)
    components = _with_sharing(spec.components, [planned[index] for index in in_order], used, num_devices)
    return Plan(nodes=nodes, components=components, mode=_mode(spec.components, used))


def _trainers_first(components: Sequence[Component]) -> list[int]:
    """Indexes in planning order: how engines are laid out may depend on where the Trainer is."""
    return sorted(range(len(components)), key=lambda index: (not TRAITS[components[index].role].publishes_weights, index))


def _with_sharing(
    components: Sequence[Component], processes: Sequence[tuple[PlannedProcess, ...]], devices: Sequence[Set[int]], num_devices: int
) -> tuple[PlannedComponent, ...]:
    users = [0] * num_devices
    """Bit set of the components on every device."""
    for index, of_component in enumerate(devices):
        bit = 1 << index
        for device in of_component:
            users[device] |= bit
    neighbors = [0] * len(components)
    for bits in set(users):
        for index in range(len(components)):
            if bits >> index & 1:
                neighbors[index] |= bits & ~(1 << index)
    return tuple(
        PlannedComponent(
            name=component.name,
            role=component.role,
            processes=processes[index],
            shares_devices_with=tuple(other.name for j, other in enumerate(components) if neighbors[index] >> j & 1),
        )
        for index, component in enumerate(components)
    )


def _mode(components: Sequence[Component], devices: Sequence[Set[int]]) -> PlacementMode:
    trainer: set[int] = set()
    rollout: set[int] = set()
    for component, its_devices in zip(components, devices, strict=True):
        traits = TRAITS[component.role]
        if traits.publishes_weights:
            trainer |= its_devices
        elif traits.receives_weights:
            rollout |= its_devices
    if trainer.isdisjoint(rollout):
        return PlacementMode.DISAGGREGATED
    if trainer == rollout:
        return PlacementMode.COLLOCATED
    return PlacementMode.PARTIAL if trainer < rollout else PlacementMode.HYBRID
