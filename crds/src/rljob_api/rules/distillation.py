"""Rules about on-policy distillation: the teacher, and what has no effect where nothing but the teacher is followed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from rljob_api.errors import FieldError, did_you_mean
from rljob_api.errors import field_error as _error
from rljob_api.planning.plan import Plan
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import Role, Teaches
from rljob_api.v1alpha1.rljob import Pipeline, RLJobSpec
from rljob_api.vocabulary import KLPlacement

_OF_SUMS = ("whiten", "clip")
"""Of ``algorithm.advantage``: what becomes of advantages of which the teacher is a part."""
_REMEDY = "remove it, or give a reward a weight"


def distills(spec: RLJobSpec) -> bool:
    """Whether the policy follows a teacher."""
    return bool(spec.with_role(Role.TEACHER))


def distills_in_loss(spec: RLJobSpec) -> bool:
    """Whether the distance to the teacher is a term of the loss."""
    return distills(spec) and spec.algorithm.distillation.placement is KLPlacement.LOSS


def distills_alone(spec: RLJobSpec) -> bool:
    """Whether scores count for nothing, so that the teacher alone says what is learned."""
    return distills(spec) and spec.pipeline is Pipeline.RLVR and not any(reward.weight for reward in spec.rewards)


def _teacher(spec: RLJobSpec) -> Iterator[FieldError]:
    teachers = spec.with_role(Role.TEACHER)
    for field, value in spec.algorithm.distillation.changed().items() if not teachers else ():
        path = f"spec.algorithm.distillation.{field}"
        remedy = "add a component with role: Teacher and its model, or remove it"
        yield _error(path, value, "has no effect, no component has role Teacher", remedy)
    for index, component in teachers:
        if component.model is None or component.model.path != spec.model.path:
            continue
        path = f"spec.components[{index}].model"
        if component.model.revision == spec.model.revision:
            problem = "is spec.model itself, and the policy begins with no distance to it"
            remedy = "name another model, or use algorithm.kl with a Reference component to stay near the first weights"
            yield _error(f"{path}.path", component.model.path, problem, remedy)
        else:
            problem = f"is another revision of spec.model.path, of which {spec.model.revision} is used, and a node has one of a repository"
            yield _error(f"{path}.revision", component.model.revision, problem, "download one of them and name its folder")


def teacher_weights(spec: RLJobSpec) -> tuple[Mapping[str, float], float]:
    """Factors of the coefficient: by tag, and of all other prompts."""
    named: dict[str, float] = {}
    others = 1.0
    for _, component in spec.with_role(Role.TEACHER):
        teaches = component.teaches or Teaches()
        named |= dict.fromkeys(teaches.sources, teaches.weight)
        others = others if teaches.sources else teaches.weight
    return named, others


def untaught_tags(spec: RLJobSpec, tags: Iterable[str]) -> list[str]:
    """Tags of training prompts that have no Teacher, in a job that has one."""
    lists = [() if component.teaches is None else component.teaches.sources for _, component in spec.with_role(Role.TEACHER)]
    if not all(lists):
        return []
    taught = {tag for sources in lists for tag in sources}
    return [tag for tag in tags if tag not in taught] if lists else []


def _teaches(spec: RLJobSpec) -> Iterator[FieldError]:
    """Every tag that is known without the data has one teacher; others are compared when the data is read."""
    known, taught, default = _known_tags(spec), dict[str, str](), None
    for index, component in enumerate(spec.components):
        path, teaches = f"spec.components[{index}].teaches", component.teaches or Teaches()
        if component.role is not Role.TEACHER:
            if component.teaches is not None:
                yield _error(path, None, f"a {component.role} teaches nothing", "remove it, or write role: Teacher and a model")
            continue
        if teaches.weight != 1 and spec.algorithm.distillation.placement is KLPlacement.LOSS:
            problem = "has no effect with algorithm.distillation.placement Loss, whose term has one coefficient"
            yield _error(f"{path}.weight", teaches.weight, problem, "remove it, or write placement: Reward")
        if not teaches.sources:
            if default is not None:
                problem = f"has no sources, so that {component.name} teaches the same prompts as {default}"
                yield _error(path, None, problem, "name the tags of its prompts in teaches.sources")
            default = default or component.name
        for number, tag in enumerate(teaches.sources):
            where = f"{path}.sources[{number}]"
            if tag in taught:
                yield _error(where, tag, f"has a teacher, {taught[tag]}, and each prompt has one", "remove it")
            elif known is not None and tag not in known:
                problem = "is the tag of no training prompt"
                yield _error(where, tag, problem, did_you_mean(tag, known) or f"use {', '.join(known)}")
            taught.setdefault(tag, component.name)
    for tag in untaught_tags(spec, known or ()):
        problem = f"name no teacher of the prompts with the tag {tag}"
        yield _error("spec.components", None, problem, "add it to the teaches.sources of a Teacher, or a Teacher without teaches.sources")
    if default is not None and known and taught.keys() >= set(known):
        index = next(i for i, component in enumerate(spec.components) if component.name == default)
        problem = f"has no sources, and other Teachers have all prompts: {', '.join(known)}"
        yield _error(f"spec.components[{index}].teaches", None, problem, f"give {default} sources of its own, or remove it")


def _known_tags(spec: RLJobSpec) -> list[str] | None:
    """Tags of the training prompts; None where only the data says them."""
    if spec.pipeline is Pipeline.AGENTIC:
        return list(dict.fromkeys(environment.name for environment in spec.environments))
    if any(source.is_tagged for source in spec.data.train):
        return None
    return list(dict.fromkeys(source.name for source in spec.data.train))


def _same_repository(spec: RLJobSpec) -> Iterator[FieldError]:
    """A node has one revision of a repository."""
    used: dict[str, tuple[str | None, str]] = {}
    for index, component in spec.with_role(Role.TEACHER):
        if component.model is None:
            continue
        revision, first = used.setdefault(component.model.path, (component.model.revision, component.name))
        if revision != component.model.revision:
            problem = f"is another revision of {component.model.path} than that of {first}, and a node has one of a repository"
            remedy = "download one of them and name its folder"
            yield _error(f"spec.components[{index}].model.revision", component.model.revision, problem, remedy)


def _without_scores(spec: RLJobSpec) -> Iterator[FieldError]:
    """Settings of what is made of scores, where there are none."""
    if not distills_alone(spec) or spec.validates_only:
        return
    algorithm = spec.algorithm
    problem = "has no effect: no reward has a weight, and the Teacher alone says what is learned"
    sections = (
        ("advantage", {field: value for field, value in algorithm.advantage.changed().items() if field not in _OF_SUMS}),
        ("reward", algorithm.reward.changed()),
        ("filters", {field: value for field, value in algorithm.filters.changed().items() if "GroupMean" in field}),
    )
    for section, changed in sections:
        for field, value in changed.items():
            yield _error(f"spec.algorithm.{section}.{field}", value, problem, _REMEDY)
    if algorithm.kl.coefficient > 0 and algorithm.kl.placement is KLPlacement.REWARD:
        without = "is part of rewards, and no reward has a weight: estimators compare the rewards of a group, whatever their size"
        yield _error("spec.algorithm.kl.placement", KLPlacement.REWARD.value, without, "write Loss, or give a reward a weight")
    if algorithm.sample_weights.difficulty:
        yield _error("spec.algorithm.sampleWeights.difficulty", True, problem, _REMEDY)
    if spec.rollout.group_filter is not None:
        yield _error("spec.rollout.groupFilter", None, problem, _REMEDY)


def _without_rewards(spec: RLJobSpec) -> Iterator[FieldError]:
    """Nothing that scores, and what would need it."""
    if spec.rewards or not distills_alone(spec):
        return
    for index, component in spec.with_role(Role.REWARD):
        yield _error(
            f"spec.components[{index}].role", component.role, f"{component.name} would do nothing, there are no rewards", "remove it"
        )
    if spec.validation.every_steps:
        problem = "has nothing to measure, there are no rewards"
        yield _error("spec.validation.everySteps", spec.validation.every_steps, problem, "add a reward with weight: 0, which only measures")


def _host_memory(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """Shares of host memory follow from the size of ``spec.model``."""
    limit = spec.offload.host_memory_bytes
    for component in plan.components:
        if limit is not None and component.shares_devices_with and TRAITS[component.role].has_own_model:
            problem = (
                f"is divided among components by the size of spec.model, and {component.name} on shared devices has a model of its own"
            )
            yield _error("spec.offload.hostMemoryBytes", limit, problem, f"remove it, or give {component.name} devices of its own")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_teacher, _teaches, _same_repository, _without_scores, _without_rewards)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_host_memory,)
"""Rules that need to know how many processes there are."""
