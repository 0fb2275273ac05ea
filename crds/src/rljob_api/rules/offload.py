"""Rules about time-division: offload policies that would have no effect, or contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.plan import Plan
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import OffloadPolicy, PlacementChoice, Role
from rljob_api.v1alpha1.operations import Residency
from rljob_api.v1alpha1.rljob import RLJobSpec


def _component_offload(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Policies that decide nothing; placements that the planner chooses may share devices or not."""
    chosen = any(component.placement.mode is PlacementChoice.AUTO for component in spec.components)
    for index, component in enumerate(spec.components):
        held = TRAITS[component.role].offload_fields
        for field, value in component.offload.model_dump(mode="json", by_alias=True).items():
            path = f"spec.components[{index}].offload.{field}"
            if value == OffloadPolicy.AUTO:
                continue
            if field not in held:
                remedy = f"remove it; a {component.role} has {', '.join(held)}" if held else "remove it"
                yield _error(path, value, f"has no effect, a {component.role} has no {field} on devices", remedy)
            elif not chosen and not plan.components[index].shares_devices_with:
                yield _error(path, value, f"has no effect, {component.name} shares no device", "remove it")
            elif spec.offload.residency is Residency.RESIDENT:
                problem = "has no effect, with offload.residency Resident everything stays"
                yield _error(path, value, problem, "remove it, or write offload.residency: Switching")


def _engine_offload(spec: RLJobSpec) -> Iterator[FieldError]:
    """Keys and values of absent weights serve nobody, and vLLM's sleep frees both together."""
    for index, component in spec.with_role(Role.ROLLOUT):
        kept, weight = component.offload.kv_cache is OffloadPolicy.NEVER, component.offload.weight
        if kept and weight is not OffloadPolicy.NEVER and spec.offload.residency is Residency.SWITCHING:
            problem = f"keeps the cache, but weight is {weight}, and an engine's weights never leave before its cache"
            remedy = "write weight: Never as well, or remove kvCache"
            yield _error(f"spec.components[{index}].offload.kvCache", "Never", problem, remedy)


def _job_offload(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Time-division without anybody to divide it."""
    chosen = any(component.placement.mode is PlacementChoice.AUTO for component in spec.components)
    shared = any(component.shares_devices_with for component in plan.components)
    path, host_bytes = "spec.offload.hostMemoryBytes", spec.offload.host_memory_bytes
    switching = spec.offload.residency is Residency.SWITCHING
    if not shared and not chosen and switching:
        remedy = "remove it, or give components the same devices"
        yield _error("spec.offload.residency", "Switching", "has no effect, no components share devices", remedy)
    if host_bytes is None:
        return
    if not switching:
        problem = "has no effect, with offload.residency Resident nothing leaves the devices"
        yield _error(path, host_bytes, problem, "remove it, or write residency: Switching")
    elif not shared and not chosen:
        yield _error(path, host_bytes, "has no effect, no components share devices", "remove it")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_engine_offload,)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (
    _component_offload,
    _job_offload,
)
"""Rules that need to know how many processes there are."""
