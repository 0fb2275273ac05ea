"""Rules about components with ``engine.type: SGLang``: what that engine cannot do, each with what happens instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.environment import device_type, node_group
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import Component, Engine, EngineType, Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.operations import Residency, UpdateMode
from rljob_api.v1alpha1.rljob import RLJobSpec


def _judges(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component, engine in _components(spec):
        if component.role is Role.JUDGE:
            path = f"spec.components[{index}].engine.type"
            yield _error(path, engine.type, "serves no Judge: judges are served by vLLM's server", "write VLLM")


def _in_flight(spec: RLJobSpec) -> Iterator[FieldError]:
    """SGLang drops cached prefixes only when nothing runs, so that later requests would begin with keys of the old weights."""
    for index, component, engine in _components(spec):
        if component.role is Role.ROLLOUT and engine.prefix_caching and spec.overlap.update_mode is UpdateMode.IN_FLIGHT:
            problem = "keeps prefixes of old weights with overlap.updateMode InFlight: SGLang cannot drop them while responses run"
            remedy = "write prefixCaching: false, or overlap.updateMode: Interrupt"
            yield _error(f"spec.components[{index}].engine.prefixCaching", True, problem, remedy)


def _seeded(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, _, engine in _components(spec):
        path = f"spec.components[{index}].engine.extraArgs.enable_deterministic_inference"
        if engine.extra_args.get("enable_deterministic_inference") and spec.rollout.min_p > 0:
            yield _error(path, True, f"ends SGLang's server at the first request with rollout.minP ({spec.rollout.min_p})", "remove one")


def _parallel(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """SGLang answers for its first rank: on CPU devices the others may hold their memory for a moment longer."""
    for index, _, engine in _components(spec):
        on_cpu = any(device_type(node_group(spec, plan, process)) is DeviceType.CPU for process in plan.components[index].processes)
        switches = spec.offload.residency is Residency.SWITCHING and plan.components[index].shares_devices_with
        if on_cpu and switches and engine.tensor_parallel_size > 1:
            problem = "needs accelerators or devices of its own with SGLang: what its ranks on CPU devices give back is not known in time"
            yield _error(f"spec.components[{index}].engine.tensorParallelSize", engine.tensor_parallel_size, problem, "write 1, or VLLM")


def _components(spec: RLJobSpec) -> Iterator[tuple[int, Component, Engine]]:
    for index, component in enumerate(spec.components):
        if component.engine is not None and component.engine.type is EngineType.SGLANG:
            yield index, component, component.engine


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_judges, _in_flight, _seeded)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_parallel,)
"""Rules that need to know where processes run."""
