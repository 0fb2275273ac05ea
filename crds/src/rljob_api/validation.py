"""All checks of a manifest, and the one entry :func:`check` that CLI, local run and driver use.

Two stages; the second needs the types of the first, each reports all it finds:

1. :mod:`rljob_api.manifest`: YAML, traps, types, unknown keys.
2. :func:`plan_or_problems`: rules between fields (here and :mod:`rljob_api.pods`), fields without effect
   (:mod:`rljob_api.supported`), placement (:mod:`rljob_api.planner`).
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from rljob_api import manifest, paths, planner, pods
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.errors import field_error as _error
from rljob_api.naming import RESERVED_LABEL_PREFIXES, RESERVED_LABELS
from rljob_api.plan import Plan
from rljob_api.supported import unsupported, unsupported_sharing
from rljob_api.v1alpha1.components import Component, Role
from rljob_api.v1alpha1.data import DataSourceType, PromptFormat
from rljob_api.v1alpha1.learning import AdvantageEstimator
from rljob_api.v1alpha1.rljob import Pipeline, RLJob, RLJobSpec
from rljob_api.vocabulary import Extraction, RewardType


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """A job without problems and where its processes run."""

    job: RLJob
    plan: Plan


def check(source: str | Mapping[str, object], *, name: str | None = None) -> CheckedJob:
    """Read, validate and plan a job.

    Args:
        source: YAML or JSON text, or a manifest that is already parsed.
        name: which RLJob to take when the text holds several.

    Raises:
        SpecInvalidError: with every problem, in the order of the manifest, with lines when ``source`` is text.
    """
    document = manifest.read(source, name=name) if isinstance(source, str) else manifest.Document(data=dict(source))
    job = manifest.to_job(document)
    plan = plan_or_problems(job.spec)
    if isinstance(plan, Plan):
        return CheckedJob(job=job, plan=plan)
    raise SpecInvalidError(manifest.arrange(document, plan))


def plan_or_problems(spec: RLJobSpec) -> Plan | list[FieldError]:
    """The plan of a spec without problems, or all of them: rules between fields, fields without effect, placement."""
    errors = [*(error for rule in RULES for error in rule(spec)), *unsupported(spec)]
    plan = planner.plan_or_errors(spec)
    if not isinstance(plan, Plan):
        return [*errors, *plan]
    errors += [error for rule in PLAN_RULES for error in rule(spec, plan)]
    errors += unsupported_sharing(plan)
    return errors or plan


def _with_role(spec: RLJobSpec, role: Role) -> list[tuple[int, Component]]:
    return [(index, component) for index, component in enumerate(spec.components) if component.role is role]


def _roles_present(spec: RLJobSpec) -> Iterator[FieldError]:
    trainers = _with_role(spec, Role.TRAINER)
    if not trainers:
        yield _error("spec.components", None, "has no Trainer", "add one component with role: Trainer")
    for index, _ in trainers[1:]:
        first = trainers[0][1].name
        yield _error(
            f"spec.components[{index}].role", "Trainer", f"a job has one Trainer, {first} already is it", "remove it or change its role"
        )
    if not _with_role(spec, Role.ROLLOUT):
        yield _error("spec.components", None, "has no Rollout", "add a component with role: Rollout")


def _engines(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        if component.engine is not None and component.role is not Role.ROLLOUT:
            path = f"spec.components[{index}].engine"
            yield _error(path, None, f"a {component.role} has no inference engine", "remove it, only a Rollout has one")


def _cpu_roles(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, component in enumerate(spec.components):
        placement = component.placement
        for field, value in (("ranks", placement.ranks), ("deviceMapping", placement.device_mapping)):
            if component.role in planner.CPU_ROLES and value is not None:
                path = f"spec.components[{index}].placement.{field}"
                yield _error(path, value, f"a {component.role} runs on CPU only and would leave its devices idle", "give workers instead")


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
    if spec.rewards and not _with_role(spec, Role.REWARD):
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
    others = [source.name for source in spec.data.train if source.type is not DataSourceType.REASONING_GYM]
    if others:
        problem = f"needs ReasoningGym sources, which verify themselves, but {', '.join(others)} is of another type"
        yield _error(f"{path}.type", "Task", problem, "use ExactMatch, MathVerify or Function")


def _mini_batches(spec: RLJobSpec) -> Iterator[FieldError]:
    prompts, mini_batches = spec.rollout.prompts_per_step, spec.training.mini_batches
    if prompts % mini_batches:
        yield _error(
            "spec.rollout.promptsPerStep",
            prompts,
            f"is not a multiple of training.miniBatches ({mini_batches})",
            f"use {_near(prompts, mini_batches)} prompts, or a divisor of {prompts} for miniBatches",
        )


def _data_parallel(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Every data-parallel process must get as many samples of a mini-batch as the others."""
    prompts, samples, mini_batches = spec.rollout.prompts_per_step, spec.rollout.samples_per_prompt, spec.training.mini_batches
    tensor = spec.training.tensor_parallel_size
    for trainer in plan.with_role(Role.TRAINER):
        if trainer.world_size % tensor or prompts % mini_batches:
            continue
        processes, in_mini_batch = trainer.world_size // tensor, prompts // mini_batches * samples
        if in_mini_batch % processes:
            yield _error(
                "spec.rollout.samplesPerPrompt",
                samples,
                f"a mini-batch has promptsPerStep {prompts} / miniBatches {mini_batches} * samplesPerPrompt {samples} = {in_mini_batch} "
                f"samples, which the {processes} data-parallel processes of {trainer.name} do not divide",
                f"use {_near_samples(prompts // mini_batches, samples, processes)} samples per prompt, or change promptsPerStep",
            )


def _near(value: int, multiple_of: int) -> str:
    """The nearest positive multiples, for example "24 or 32"."""
    low = value // multiple_of * multiple_of
    return f"{low} or {low + multiple_of}" if low else str(multiple_of)


def _near_samples(prompts: int, samples: int, processes: int) -> str:
    """The samples per prompt nearest to ``samples`` for which the processes divide the mini-batch."""
    fitting = [count for count in range(1, samples + processes + 1) if prompts * count % processes == 0]
    below = [count for count in fitting if count < samples][-1:]
    above = [count for count in fitting if count > samples][:1]
    return " or ".join(str(count) for count in below + above)


def _trainer_parallelism(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    tensor = spec.training.tensor_parallel_size
    for trainer in plan.with_role(Role.TRAINER):
        if trainer.world_size % tensor:
            yield _error(
                "spec.training.tensorParallelSize",
                tensor,
                f"does not divide the {trainer.world_size} devices of {trainer.name}",
                f"use a divisor of {trainer.world_size}, or {_near(trainer.world_size, tensor)} devices",
            )


def _algorithm(spec: RLJobSpec) -> Iterator[FieldError]:
    advantage, samples = spec.algorithm.advantage, spec.rollout.samples_per_prompt
    if advantage.estimator in (AdvantageEstimator.GRPO, AdvantageEstimator.RLOO) and samples < 2:
        problem = f"{advantage.estimator} compares the responses to one prompt and needs at least 2"
        yield _error("spec.rollout.samplesPerPrompt", samples, problem, "write 2 or more")
    if advantage.estimator is not AdvantageEstimator.GRPO and not advantage.normalize_std:
        problem = f"has no effect with estimator {advantage.estimator}"
        yield _error("spec.algorithm.advantage.normalizeStd", False, problem, "remove it, or use estimator GRPO")
    references, coefficient = _with_role(spec, Role.REFERENCE), spec.algorithm.kl.coefficient
    if coefficient > 0 and not references:
        remedy = "add a component with role: Reference, or write 0"
        yield _error("spec.algorithm.kl.coefficient", coefficient, "needs a Reference component to compare with", remedy)
    if coefficient == 0:
        for index, component in references:
            problem = f"{component.name} would do nothing, algorithm.kl.coefficient is 0"
            yield _error(f"spec.components[{index}].role", "Reference", problem, "set the coefficient, or remove the component")


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


def _schedule(spec: RLJobSpec) -> Iterator[FieldError]:
    warmup, steps = spec.training.warmup_steps, spec.training.steps
    if warmup > steps:
        problem = f"is more than training.steps ({steps}), so the peak learning rate is never reached"
        yield _error("spec.training.warmupSteps", warmup, problem, f"use at most {steps}")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _roles_present,
    _engines,
    _cpu_roles,
    _unique_names,
    _labels,
    _sources,
    _rewards,
    _mini_batches,
    _algorithm,
    _prompt,
    _schedule,
    *pods.RULES,
)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_data_parallel, _trainer_parallelism)
"""Rules that need to know how many processes there are."""
