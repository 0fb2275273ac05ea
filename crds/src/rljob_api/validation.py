"""All checks of a manifest, and the one entry :func:`check` that CLI, local run and driver use.

Two stages; the second needs the types of the first, each reports all it finds. Where only keys are unknown both report. What was not
checked because of what comes before is said at the end of the problems:

1. :mod:`rljob_api.reading.manifest`: YAML, traps, types, unknown keys.
2. rules between fields (:mod:`rljob_api.rules`), placement (:mod:`rljob_api.planner`); where there is one, rules that need it, and what
   fits (:mod:`rljob_api.memory`).

A job that has started is not refused by checks that a later version adds, as long as types, keys, form and placement are right
(docs/design/0012).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from rljob_api import planner
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.planning.plan import Plan
from rljob_api.reading import manifest
from rljob_api.roles import TRAITS
from rljob_api.rules import (
    algorithm,
    cluster,
    components,
    data,
    distillation,
    engine_arguments,
    environments,
    judges,
    offload,
    pods,
    rewards,
    rollout,
    router_replay,
    sglang,
    stages,
    trainer,
    validation_only,
    weight_sync,
    workers,
)
from rljob_api.rules.model import ConfigReader, model_problems
from rljob_api.v1alpha1.base import SpecModel
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.rljob import RLJob, RLJobSpec

if TYPE_CHECKING:
    from rljob_api.memory import ModelShape, Served, ShapeReader

ENOUGH_STEPS: Final = 10_000_000
"""More training steps than all warmups together can have."""
Section = TypeVar("Section", bound=SpecModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedJob:
    """A job without problems and where its processes run."""

    job: RLJob
    plan: Plan
    not_yet: tuple[FieldError, ...] = ()
    """What a run would refuse because it has no effect yet or of its model; only where that was allowed, else such a job does not check."""
    shape: ModelShape | None = None
    """Size of its model, where that is known."""
    served: Served | None = None
    """Sizes of the models that components have of their own, where somebody looked for them."""
    tolerated: tuple[FieldError, ...] = ()
    """Problems that a new job would be refused for; only of a job that has started."""


def check(
    source: str | Mapping[str, object],
    *,
    name: str | None = None,
    runnable: bool = True,
    started: bool = False,
    shape_of: ShapeReader | None = None,
    config_of: ConfigReader | None = None,
) -> CheckedJob:
    """Read, validate and plan a job.

    Args:
        source: YAML or JSON text, or a manifest that is already parsed.
        name: which RLJob to take when the text holds several.
        runnable: whether fields that have no effect yet are problems; planning alone can do without.
        started: the job has already started with this spec (fields that may change excepted), possibly under a version with fewer checks.
            Problems that no edit of those fields can solve are returned as :attr:`CheckedJob.tolerated`.
        config_of: reads the config.json of a model, so that one that a run would refuse is reported.
        shape_of: says how large a model is, for the memory estimate; without it, or where it does not know, its parameterCount.

    Raises:
        SpecInvalidError: with every problem, in the order of the manifest, with lines when ``source`` is text.
    """
    document = manifest.read(source, name=name) if isinstance(source, str) else manifest.Document(data=dict(source))
    try:
        job, unknown = manifest.to_job_with_unknown_keys(document)
    except SpecInvalidError as error:
        raise SpecInvalidError(error.errors, _unchecked_without_types(len(error.errors))) from None
    shape, served = _shapes(job.spec, shape_of)
    plan, errors, not_yet = _examined(job.spec, shape, served, config_of)
    tolerated: list[FieldError] = []
    if started and errors and plan is not None:
        # By path: numbers in a text may follow from a field that may change.
        lasting = {error.path for error in _examined(_without_changes(job.spec), shape, served, None)[1]}
        without_form = {error for rule in pods.FORM_RULES for error in rule(job.spec)}
        tolerated = [error for error in errors if error.path in lasting and error not in without_form]
        errors = [error for error in errors if error not in tolerated]
    if plan is None or unknown or errors or (runnable and not_yet):
        unchecked = _unchecked_without_plan() if plan is None else None
        raise SpecInvalidError(manifest.arrange(document, [*unknown, *errors, *not_yet]), unchecked)
    return CheckedJob(
        job=job,
        plan=plan,
        not_yet=tuple(manifest.arrange(document, not_yet)),
        shape=shape,
        served=served,
        tolerated=tuple(manifest.arrange(document, tolerated)),
    )


def _without_changes(spec: RLJobSpec) -> RLJobSpec:
    """The spec with values of the fields that may change after the start that no check objects to."""
    from rljob_api.crd.schema import MUTABLE_BELOW, MUTABLE_SPEC_FIELDS  # only where an upgrade has brought a new check

    sections = {name: _with_defaults(getattr(spec, name), mutable) for name, mutable in MUTABLE_BELOW.items()}
    # A job without a trainer validates the model alone, which training.steps: 0 says; one with a trainer has more steps than any warmup.
    steps = ENOUGH_STEPS if spec.with_role(Role.TRAINER) else 0
    sections["training"] = sections["training"].model_copy(update={"steps": steps})
    return _with_defaults(spec, MUTABLE_SPEC_FIELDS).model_copy(update=sections)


def _with_defaults(section: Section, aliases: Collection[str]) -> Section:
    fields = {name: field.default for name, field in type(section).model_fields.items() if field.alias in aliases}
    return section.model_copy(update=fields)


def _unchecked_without_types(num_problems: int) -> str:
    """Of a manifest that is no job yet."""
    fixed = "this problem is" if num_problems == 1 else "these problems are"
    number = len(RULES) + len(PLAN_RULES) + 2
    return f"{number} more checks (of fields against each other, placement, memory) are made once {fixed} fixed"


def _unchecked_without_plan() -> str:
    """Of a job whose processes have no place."""
    return f"{len(PLAN_RULES) + 1} more checks (of settings against the placement, memory) are made once the placement is possible"


def _shapes(spec: RLJobSpec, shape_of: ShapeReader | None) -> tuple[ModelShape | None, Served | None]:
    """(of the job's model, of components' own); None where nobody looks."""
    if shape_of is None:
        return None, None
    from rljob_api import memory

    return shape_of(spec.model), memory.served_shapes(spec, shape_of)


def _examined(
    spec: RLJobSpec, shape: ModelShape | None, served: Served | None, config_of: ConfigReader | None
) -> tuple[Plan | None, list[FieldError], list[FieldError]]:
    """The plan, if there is one; all problems; what has no effect yet, or a model that cannot be trained yet."""
    errors = [error for rule in RULES for error in rule(spec)]
    not_yet = model_problems(spec, config_of) if config_of is not None else []
    plan = planner.plan_or_errors(spec)
    if not isinstance(plan, Plan):
        return None, [*errors, *plan], not_yet
    errors += [error for rule in PLAN_RULES for error in rule(spec, plan)]
    errors += _memory(spec, plan, shape, served)
    return plan, errors, not_yet


def _memory(spec: RLJobSpec, plan: Plan, shape: ModelShape | None, served: Served | None) -> list[FieldError]:
    """What does not fit; the estimate is only made where there is something to check: sizes, or engines that share a device."""
    engines = [component for component in plan.components if TRAITS[component.role].has_engine]
    held = [len(process.devices) for component in engines for process in component.processes]
    shared = sum(held) > len({device for component in engines for device in component.devices})
    if shape is None and spec.model.parameter_count is None and not shared:
        return []
    from rljob_api import memory

    return memory.problems_of(spec, plan, shape, served)


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    *components.RULES,
    *data.RULES,
    *rewards.RULES,
    *judges.RULES,
    *environments.RULES,
    *workers.RULES,
    *offload.RULES,
    *pods.RULES,
    *cluster.RULES,
    *engine_arguments.RULES,
    *stages.RULES,
    *algorithm.RULES,
    *distillation.RULES,
    *rollout.RULES,
    *router_replay.RULES,
    *sglang.RULES,
    *trainer.RULES,
    *weight_sync.RULES,
    *validation_only.RULES,
)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (
    *components.PLAN_RULES,
    *judges.PLAN_RULES,
    *distillation.PLAN_RULES,
    *engine_arguments.PLAN_RULES,
    *offload.PLAN_RULES,
    *rollout.PLAN_RULES,
    *router_replay.PLAN_RULES,
    *sglang.PLAN_RULES,
    *stages.PLAN_RULES,
    *trainer.PLAN_RULES,
    *weight_sync.PLAN_RULES,
)
"""Rules that need to know how many processes there are."""
