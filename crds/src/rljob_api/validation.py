"""All checks of a manifest, and the one entry :func:`check` that CLI, local run and driver use.

Two stages; the second needs the types of the first, each reports all it finds:

1. :mod:`rljob_api.manifest`: YAML, traps, types, unknown keys.
2. rules between fields (here, :mod:`rljob_api.pods`, :mod:`rljob_api.algorithm_rules`, :mod:`rljob_api.rollout_rules` and
   :mod:`rljob_api.trainer_rules`), fields without effect (:mod:`rljob_api.supported`), placement (:mod:`rljob_api.planner`).
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rljob_api import algorithm_rules, manifest, paths, planner, pods, rollout_rules, trainer_rules
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.errors import field_error as _error
from rljob_api.naming import RESERVED_ENV_PREFIX, RESERVED_LABEL_PREFIXES, RESERVED_LABELS
from rljob_api.placement import environment
from rljob_api.plan import PlacementMode, Plan
from rljob_api.roles import TRAITS, RunsOn
from rljob_api.supported import unsupported
from rljob_api.v1alpha1.components import OffloadPolicy, PlacementChoice, Role
from rljob_api.v1alpha1.data import DataSourceType, PromptFormat
from rljob_api.v1alpha1.operations import Residency
from rljob_api.v1alpha1.rljob import Pipeline, RLJob, RLJobSpec
from rljob_api.vocabulary import Extraction, RewardType

if TYPE_CHECKING:
    from rljob_api.memory import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """A job without problems and where its processes run."""

    job: RLJob
    plan: Plan
    not_yet: tuple[FieldError, ...] = ()
    """What a run would refuse because it has no effect yet; only where that was allowed, else such a job does not check."""
    shape: ModelShape | None = None
    """Size of its model, where that is known."""


ShapeReader = Callable[[RLJobSpec], "ModelShape | None"]
"""Finds out how large a job's model is; None where that cannot be known."""


def check(
    source: str | Mapping[str, object], *, name: str | None = None, runnable: bool = True, shape_of: ShapeReader | None = None
) -> CheckedJob:
    """Read, validate and plan a job.

    Args:
        source: YAML or JSON text, or a manifest that is already parsed.
        name: which RLJob to take when the text holds several.
        runnable: whether fields that have no effect yet are problems; planning alone can do without.
        shape_of: says how large the model is, for the memory estimate; without it, or where it does not know, spec.model.parameterCount.

    Raises:
        SpecInvalidError: with every problem, in the order of the manifest, with lines when ``source`` is text.
    """
    document = manifest.read(source, name=name) if isinstance(source, str) else manifest.Document(data=dict(source))
    job = manifest.to_job(document)
    shape = shape_of(job.spec) if shape_of is not None else None
    plan, errors, not_yet = _examined(job.spec, shape)
    if plan is None or errors or (runnable and not_yet):
        raise SpecInvalidError(manifest.arrange(document, [*errors, *not_yet]))
    return CheckedJob(job=job, plan=plan, not_yet=tuple(manifest.arrange(document, not_yet)), shape=shape)


def _examined(spec: RLJobSpec, shape: ModelShape | None) -> tuple[Plan | None, list[FieldError], list[FieldError]]:
    """The plan, if there is one; all problems; what has no effect yet."""
    errors = [error for rule in RULES for error in rule(spec)]
    not_yet = unsupported(spec)
    plan = planner.plan_or_errors(spec)
    if not isinstance(plan, Plan):
        return None, [*errors, *plan], not_yet
    errors += [error for rule in PLAN_RULES for error in rule(spec, plan)]
    errors += _memory(spec, plan, shape)
    return plan, errors, not_yet


def _memory(spec: RLJobSpec, plan: Plan, shape: ModelShape | None) -> list[FieldError]:
    """What does not fit; the estimate is only made where there is something to check."""
    shared = any(len(component.devices) < sum(len(p.devices) for p in component.processes) for component in plan.components)
    if shape is None and spec.model.parameter_count is None and not shared:
        return []
    from rljob_api import memory

    return memory.problems_of(spec, plan, shape)


def _number_of_components(spec: RLJobSpec) -> Iterator[FieldError]:
    """As many components of every role as a job has."""
    for role, traits in TRAITS.items():
        present = spec.with_role(role)
        if len(present) < traits.min_components:
            how_many = "one component" if traits.max_components == 1 else "a component"
            yield _error("spec.components", None, f"has no {role}", f"add {how_many} with role: {role}")
        for index, _ in present[traits.max_components :] if traits.max_components is not None else ():
            problem = f"a job has one {role}, {present[0][1].name} already is it"
            yield _error(f"spec.components[{index}].role", role, problem, "remove it or change its role")


def _engines(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        if component.engine is not None and not TRAITS[component.role].has_engine:
            path = f"spec.components[{index}].engine"
            yield _error(path, None, f"a {component.role} has no inference engine", "remove it, only a Rollout has one")


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


def _unique_names(spec: RLJobSpec) -> Iterator[FieldError]:
    """Node groups and components are the planner's."""
    named = (
        ("spec.rewards", spec.rewards),
        ("spec.data.train", spec.data.train),
        ("spec.data.validation", spec.data.validation),
        ("spec.environments", spec.environments),
    )
    for path, items in named:
        yield from _repeats(path, [item.name for item in items])
    for path, env in pods.environments(spec):
        yield from _repeats(path, [variable.name for variable in env])


def _repeats(path: str, names: list[str]) -> Iterator[FieldError]:
    counts = Counter(names)
    for index, name in enumerate(names):
        first = names.index(name) if counts[name] > 1 else index
        if first != index:
            yield _error(f"{path}[{index}].name", name, f"is already the name of {path}[{first}]", "give every entry its own name")


def _place_variables(spec: RLJobSpec) -> Iterator[FieldError]:
    """What says where a process runs is not for users to set, see :mod:`rljob_api.placement.environment`."""
    for path, env in pods.environments(spec):
        for index, variable in enumerate(env):
            # RLJOB_* is reserved everywhere, by pods; the head runs no worker.
            if variable.name in environment.VARIABLES and not variable.name.startswith(RESERVED_ENV_PREFIX) and path != "spec.head.env":
                problem = "says where a worker runs, and is set by the system"
                yield _error(f"{path}[{index}].name", variable.name, problem, "remove it, the placement decides")


def _interpreters(spec: RLJobSpec) -> Iterator[FieldError]:
    owners = [(f"spec.nodeGroups[{index}]", group.python_interpreter) for index, group in enumerate(spec.node_groups)]
    owners += [(f"spec.components[{index}]", component.python_interpreter) for index, component in enumerate(spec.components)]
    for path, interpreter in owners:
        if interpreter is not None and not interpreter.startswith("/"):
            problem = "is not an absolute path, and workers start in folders of Ray's choice"
            yield _error(f"{path}.pythonInterpreter", interpreter, problem, "write it out, for example /opt/robots/bin/python")


def _hardware(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, group in enumerate(spec.node_groups):
        if group.hardware is None:
            continue
        path = ("spec", "nodeGroups", index, "hardware", "configs")
        if not group.hardware.configs:
            problem = f"lists no {group.hardware.type}, so nothing can be placed on this group"
            yield _error(paths.join(path), None, problem, "add one entry per piece, or remove hardware")
        for position, config in enumerate(group.hardware.configs):
            yield from _finite((*path, position, "parameters"), config.parameters)


def _finite(parts: paths.Parts, value: object) -> Iterator[FieldError]:
    """Workers get parameters as JSON, which has no word for these numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        yield _error(paths.join(parts), str(value), "cannot be written as JSON", "use a finite number, or a text")
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _finite((*parts, key), child)


def _labels(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, group in enumerate(spec.node_groups):
        for key, value in group.labels.items():
            prefix = next((prefix for prefix in RESERVED_LABEL_PREFIXES if key.startswith(prefix)), None)
            if prefix is not None:
                path = paths.join(("spec", "nodeGroups", index, "labels", key))
                yield _error(path, value, f"labels that start with {prefix} are set by the system", "use a prefix of your own")
            elif key in RESERVED_LABELS:
                path = paths.join(("spec", "nodeGroups", index, "labels", key))
                yield _error(path, value, "is a label that KubeRay sets", "use a prefix of your own")


def _sources(spec: RLJobSpec) -> Iterator[FieldError]:
    for field, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            path = f"spec.data.{field}[{index}]"
            members = {
                DataSourceType.REASONING_GYM: ("reasoningGym", source.reasoning_gym),
                DataSourceType.JSONL: ("jsonl", source.jsonl),
            }
            for kind, (member, settings) in members.items():
                if source.type is kind and settings is None:
                    yield _error(path, None, f"has type {kind} but no {member}", f"add {member} with the settings of the source")
                if source.type is not kind and settings is not None:
                    problem = f"belongs to type {kind}, the type is {source.type}"
                    yield _error(f"{path}.{member}", None, problem, "remove it or change the type")


def _rewards(spec: RLJobSpec) -> Iterator[FieldError]:
    if spec.pipeline is Pipeline.RLVR and not spec.rewards:
        yield _error("spec.rewards", None, "an RLVR job needs a reward", "add at least one, for example {name: answer, type: ExactMatch}")
    if spec.rewards and not spec.with_role(Role.REWARD):
        remedy = "add {name: reward, role: Reward, placement: {workers: 1}}"
        yield _error("spec.components", None, "has no Reward component to compute spec.rewards in", remedy)
    for index, reward in enumerate(spec.rewards):
        path = f"spec.rewards[{index}]"
        is_function = reward.type is RewardType.FUNCTION
        if is_function and reward.function is None:
            yield _error(path, None, "has type Function but no function", "add function: module:name")
        if not is_function and reward.function is not None:
            problem = f"belongs to type Function, the type is {reward.type}"
            yield _error(f"{path}.function", reward.function, problem, "remove it or write type: Function")
        if is_function and reward.extraction is not Extraction.WHOLE:
            yield _error(f"{path}.extraction", reward.extraction.value, "has no effect, a Function gets the whole response", "remove it")
        if reward.type is RewardType.TASK:
            yield from _task_sources(spec, path)


def _task_sources(spec: RLJobSpec, path: str) -> Iterator[FieldError]:
    sources = (*spec.data.train, *spec.data.validation)
    others = [source.name for source in sources if source.type is not DataSourceType.REASONING_GYM]
    if others:
        problem = f"needs ReasoningGym sources, which verify themselves, but {', '.join(others)} is of another type"
        yield _error(f"{path}.type", "Task", problem, "use ExactMatch, MathVerify or Function")


def _prompt(spec: RLJobSpec) -> Iterator[FieldError]:
    prompt = spec.data.prompt
    if prompt.chat_template:
        if prompt.template != PromptFormat().template:
            problem = "has no effect, chatTemplate is on and takes the question alone"
            yield _error("spec.data.prompt.template", prompt.template, problem, "remove it, or switch chatTemplate off")
        return
    if prompt.system:
        problem = "has no effect without a chat template"
        yield _error("spec.data.prompt.system", prompt.system, problem, "remove it, or write chatTemplate: true")
    yield from _template(prompt.template)


def _template(template: str) -> Iterator[FieldError]:
    """The template is a Python format string with one plain field."""
    path = "spec.data.prompt.template"
    try:
        fields = [piece[1:] for piece in string.Formatter().parse(template) if piece[1] is not None]
    except ValueError as error:
        yield _error(path, template, f"is not a template: {error}", "write literal braces as {{ and }}")
        return
    if ("question", "", None) not in fields:
        yield _error(path, template, "does not contain {question}", "put {question} where the question belongs")
    for name, form, conversion in fields:
        if (name, form, conversion) != ("question", "", None):
            problem = f"contains the placeholder {{{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}}}"
            yield _error(path, template, problem, "only {question} is filled in; write literal braces as {{ and }}")


def _measured(spec: RLJobSpec) -> Iterator[FieldError]:
    if spec.measured is not None and all(c.placement.mode is not PlacementChoice.AUTO for c in spec.components):
        problem = "has no effect, no component has placement: {mode: Auto}"
        yield _error("spec.measured", None, problem, "remove it, or let the planner choose a placement")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _number_of_components,
    _engines,
    _unique_names,
    _place_variables,
    _interpreters,
    _hardware,
    _labels,
    _sources,
    _rewards,
    _prompt,
    _measured,
    _engine_offload,
    *pods.RULES,
    *algorithm_rules.RULES,
    *rollout_rules.RULES,
    *trainer_rules.RULES,
)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (
    _on_cpu_alone,
    _hardware_roles,
    _partial,
    _component_offload,
    _job_offload,
    *rollout_rules.PLAN_RULES,
    *trainer_rules.PLAN_RULES,
)
"""Rules that need to know how many processes there are."""
