"""Rules about ``engine.pipelineParallelSize``: what an engine whose layers are divided over stages cannot do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.adapters import serves_adapters
from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.environment import device_type, node_group
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import EngineType, Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import RouterReplay


def _stages(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        engine = component.engine
        if engine is None or engine.pipeline_parallel_size == 1:
            continue
        path, stages = f"spec.components[{index}].engine.pipelineParallelSize", engine.pipeline_parallel_size
        if engine.type is not EngineType.VLLM:
            yield _error(path, stages, f"divides layers over stages with vLLM only; engine.type is {engine.type}", _REMEDY)
        if component.role is not Role.ROLLOUT:
            continue
        if serves_adapters(spec):
            problem = "serves no adapters: vLLM's stages each have a part of the layers, and RLJob hands adapters over for all of them"
            yield _error(path, stages, problem, f"{_REMEDY}, or weightSync.adapters: Merged")
        if spec.training.router_replay is not RouterReplay.DISABLED:
            problem = (
                "returns no routes: vLLM collects the routes of layers in the process that samples, where those of other stages are not"
            )
            yield _error(path, stages, problem, f"{_REMEDY}, or training.routerReplay: Disabled")


def _judges_on_cpu(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """vLLM 0.32 makes the buffers of later stages in a trial run that it leaves out on CPU; only a Rollout's engine makes them itself."""
    for index, component in spec.with_role(Role.JUDGE):
        stages = component.engine.pipeline_parallel_size if component.engine is not None else 1
        on_cpu = any(device_type(node_group(spec, plan, process)) is DeviceType.CPU for process in plan.components[index].processes)
        if on_cpu and stages > 1:
            problem = "needs accelerators for a Judge: on CPU vLLM's server fails at the first request"
            yield _error(f"spec.components[{index}].engine.pipelineParallelSize", stages, problem, _REMEDY)


_REMEDY = "use tensorParallelSize"

RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_stages,)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_judges_on_cpu,)
"""Rules that need to know where processes run."""
