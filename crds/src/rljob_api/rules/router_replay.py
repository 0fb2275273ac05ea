"""Rules about ``training.routerReplay: Engine``: which engines can say which experts they chose.

Whether the model has experts is known where its ``config.json`` is (:mod:`.model`). vLLM itself refuses what it cannot join with it on
accelerators, such as context parallelism, when it starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.environment import device_type, node_group
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import Engine, EngineType, Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import RouterReplay

_OR_OFF = "or training.routerReplay: Disabled"


def _engine_type(spec: RLJobSpec) -> Iterator[FieldError]:
    for path, _, engine in _engines(spec):
        if engine.type is not EngineType.VLLM:
            problem = f"returns no routes to RLJob, which training.routerReplay {spec.training.router_replay} needs"
            yield _error(f"{path}.type", engine.type, problem, f"write VLLM, {_OR_OFF}")


def _on_its_devices(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """On accelerators vLLM keeps the routes of cached prefixes with these; on CPU RLJob reads them in the engine's own process."""
    replay = f"training.routerReplay {spec.training.router_replay}"
    for path, index, engine in _engines(spec):
        if engine.type is not EngineType.VLLM:
            continue
        on_cpu = any(device_type(node_group(spec, plan, process)) is DeviceType.CPU for process in plan.components[index].processes)
        if not on_cpu and not engine.prefix_caching:
            problem = f"contradicts {replay}: on accelerators vLLM returns routes with cached prefixes only"
            yield _error(f"{path}.prefixCaching", False, problem, f"write true, {_OR_OFF}")
        if on_cpu and engine.tensor_parallel_size > 1:
            problem = f"contradicts {replay}: on CPU devices routes are read in the engine's own process, where its shards are not"
            yield _error(f"{path}.tensorParallelSize", engine.tensor_parallel_size, problem, f"write 1, {_OR_OFF}")
        if on_cpu and (speculative := engine.extra_args.get("speculative_config")) is not None:
            problem = f"contradicts {replay}: on CPU devices routes of drafted tokens cannot be distinguished from those of sampled ones"
            yield _error(f"{path}.extraArgs.speculative_config", speculative, problem, f"remove it, {_OR_OFF}")


def _engines(spec: RLJobSpec) -> Iterator[tuple[str, int, Engine]]:
    """Path, index of the component and settings of the engines that sample what is trained, where routes are asked for."""
    if spec.training.router_replay is RouterReplay.DISABLED:
        return
    for index, component in spec.with_role(Role.ROLLOUT):
        yield f"spec.components[{index}].engine", index, component.engine or Engine()


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_engine_type,)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_on_its_devices,)
"""Rules that need to know where processes run."""
