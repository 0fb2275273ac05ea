"""Rules about components: how many of each role, and what each may have and use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.plan import PlacementMode, Plan
from rljob_api.roles import TRAITS, RunsOn
from rljob_api.v1alpha1.components import PlacementChoice, Role
from rljob_api.v1alpha1.rljob import RLJobSpec


def _number_of_components(spec: RLJobSpec) -> Iterator[FieldError]:
    """As many components of every role as a job has."""
    for role, traits in TRAITS.items():
        present = spec.with_role(role)
        if len(present) < (0 if spec.validates_only and traits.is_trained else traits.min_components):
            how_many = "one component" if traits.max_components == 1 else "a component"
            yield _error("spec.components", None, f"has no {role}", f"add {how_many} with role: {role}")
        for index, _ in present[traits.max_components :] if traits.max_components is not None else ():
            problem = f"a job has one {role}, {present[0][1].name} already is it"
            yield _error(f"spec.components[{index}].role", role, problem, "remove it or change its role")


def _engines(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        if component.engine is not None and not TRAITS[component.role].has_engine:
            path = f"spec.components[{index}].engine"
            yield _error(path, None, f"a {component.role} has no inference engine", "remove it, only a Rollout or Judge has one")


def _parallel_sizes(spec: RLJobSpec) -> Iterator[FieldError]:
    """Only on roles whose processes divide layers, sequences or experts among them, and have no other field that says so."""
    for index, component in enumerate(spec.components):
        for field, size in (
            ("tensorParallelSize", component.tensor_parallel_size),
            ("contextParallelSize", component.context_parallel_size),
            ("expertParallelSize", component.expert_parallel_size),
        ):
            if size is not None and not TRAITS[component.role].takes_parallel_sizes:
                yield _misplaced_size(f"spec.components[{index}].{field}", field, size, component.role)


def _misplaced_size(path: str, field: str, size: int, role: Role) -> FieldError:
    traits = TRAITS[role]
    if traits.sized_by_training:
        return _error(path, size, f"a {role} has training.{field}", f"write {size} there")
    if not traits.has_engine:
        return _error(path, size, f"a {role} has no layers to divide", "remove it")
    if field == "tensorParallelSize":
        return _error(path, size, f"a {role} has engine.tensorParallelSize", f"write {size} there")
    return _error(path, size, f"a {role} computes with engines, which have no such size", "remove it, or use engine.tensorParallelSize")


def _own_models(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        path = f"spec.components[{index}]"
        if TRAITS[component.role].has_own_model and component.model is None:
            yield _error(path, None, f"a {component.role} has no model", "add model: {path: owner/name}")
        elif component.model is not None and not TRAITS[component.role].has_own_model:
            yield _error(f"{path}.model", None, f"a {component.role} has spec.model", "remove it")


def _measured(spec: RLJobSpec) -> Iterator[FieldError]:
    if spec.measured is not None and all(c.placement.mode is not PlacementChoice.AUTO for c in spec.components):
        problem = "has no effect, no component has placement: {mode: Auto}"
        yield _error("spec.measured", None, problem, "remove it, or let the planner choose a placement")


def _on_cpu_alone(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        if TRAITS[component.role].runs_on is RunsOn.CPU and plan.components[index].devices:
            placement = component.placement
            field, value = ("ranks", placement.ranks) if placement.ranks is not None else ("deviceMapping", placement.device_mapping)
            path = f"spec.components[{index}].placement.{field}"
            problem = f"a {component.role} runs on CPU only and would leave its devices idle"
            yield _error(path, value, problem, "give workers, or nodeGroups: [node]")


def _hardware_roles(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Robots go to Environments, and who names a group for its robots gets some."""
    kinds = {group.name: group.hardware.type for group in spec.node_groups if group.hardware is not None}
    for index, component in enumerate(spec.components):
        path, placement = f"spec.components[{index}].placement", component.placement
        takes_hardware = TRAITS[component.role].runs_on is RunsOn.CPU_OR_HARDWARE
        used = next((p.hardware_type for p in plan.components[index].processes if p.local_hardware), None)
        if used is not None and not takes_hardware:
            problem = f"gives a {component.role} {used}, which only an Environment can use"
            yield _error(f"{path}.ranks", placement.ranks, problem, "give workers, or nodeGroups: [node]")
        named = [name for name in placement.node_groups if name in kinds]
        if named and used is None and takes_hardware and placement.workers is not None:
            problem = f"are processes without hardware, though {named[0]} has {kinds[named[0]]}"
            yield _error(f"{path}.workers", placement.workers, problem, "give ranks, which count the pieces of hardware, or name no group")


def _partial(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Partial mode (ROLL: partial GPU mode) pays only while some engine goes on."""
    if plan.mode is not PlacementMode.PARTIAL:
        return
    trainer = {device for component in plan.with_role(Role.TRAINER) for device in component.devices}
    rollouts = [(index, plan.components[index]) for index, _ in spec.with_role(Role.ROLLOUT)]
    if all(trainer & set(process.devices) for _, component in rollouts for process in component.processes):
        problem = "has the Trainer on a device of every engine, so that no engine goes on while it trains"
        yield _error(f"spec.components[{rollouts[0][0]}].placement", None, problem, "add engines, or give both the same devices")
    if spec.overlap.async_generation_ratio == 0:
        problem = "is 0, so the engines beside the Trainer's devices wait while it trains"
        remedy = "write 1, or give Trainer and Rollout the same devices"
        yield _error("spec.overlap.asyncGenerationRatio", 0, problem, remedy)


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _number_of_components,
    _engines,
    _parallel_sizes,
    _own_models,
    _measured,
)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (
    _on_cpu_alone,
    _hardware_roles,
    _partial,
)
"""Rules that need to know how many processes there are."""
