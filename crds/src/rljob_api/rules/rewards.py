"""Rules about rewards: what their types take, and which prompts they score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.errors import FieldError, did_you_mean
from rljob_api.errors import field_error as _error
from rljob_api.rules.distillation import distills
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.data import DataSource, DataSourceType, Reward
from rljob_api.v1alpha1.rljob import Pipeline, RLJobSpec
from rljob_api.vocabulary import REWARD_PARAMETERS, Extraction, RewardType

_FUNCTION_ONLY = ("network", "processes", "read_paths")


def _rewards(spec: RLJobSpec) -> Iterator[FieldError]:
    if spec.pipeline is Pipeline.RLVR and not spec.rewards and not (distills(spec) and not spec.validates_only):
        remedy = "add at least one, for example {name: answer, type: ExactMatch}, or a component with role Teacher"
        yield _error("spec.rewards", None, "an RLVR job needs a reward", remedy)
    if spec.rewards and spec.pipeline is Pipeline.RLVR and not spec.with_role(Role.REWARD):
        remedy = "add {name: reward, role: Reward, placement: {workers: 1}}"
        yield _error("spec.components", None, "has no Reward component to compute spec.rewards in", remedy)
    if spec.rewards and not any(reward.weight for reward in spec.rewards) and not distills(spec) and not spec.validates_only:
        yield _error("spec.rewards", None, "all have weight 0, so every score is 0 and nothing is learned", "give at least one a weight")
    for index, reward in enumerate(spec.rewards):
        path = f"spec.rewards[{index}]"
        yield from _function(reward, path)
        yield from _parameters(reward, path)
        if reward.type is RewardType.TASK:
            yield from _task_sources(spec, reward, path)
        if reward.weight < 0 and reward.on_timeout is None:
            problem = "makes onTimeout, 0 by default, the best that a response can get"
            yield _error(f"{path}.weight", reward.weight, problem, "write onTimeout: the reward's highest score, or Drop")


def _function(reward: Reward, path: str) -> Iterator[FieldError]:
    if reward.type is RewardType.FUNCTION:
        if reward.function is None:
            yield _error(path, None, "has type Function but no function", "add function: module:name")
        if reward.extraction is not Extraction.WHOLE:
            yield _error(f"{path}.extraction", reward.extraction.value, "has no effect, a Function gets the whole response", "remove it")
        return
    if reward.function is not None:
        problem = f"belongs to type Function, the type is {reward.type}"
        yield _error(f"{path}.function", reward.function, problem, "remove it or write type: Function")
    for name in _FUNCTION_ONLY:
        value = getattr(reward, name)
        if value:
            alias = type(reward).model_fields[name].alias
            yield _error(f"{path}.{alias}", value, f"is for type Function, the type is {reward.type}", "remove it")


def _parameters(reward: Reward, path: str) -> Iterator[FieldError]:
    """Those of a Function are compared with its signature where it can be imported."""
    valid = REWARD_PARAMETERS.get(reward.type)
    if valid is None:
        return
    for key, value in reward.parameters.items():
        where = f"{path}.parameters.{key}"
        if key not in valid:
            remedy = did_you_mean(key, valid) or f"it takes {', '.join(valid) or 'none'}"
            yield _error(where, value, f"is not a parameter of type {reward.type}", remedy)
        elif type(value) not in valid[key]:
            names = " or ".join(kind.__name__ for kind in valid[key])
            yield _error(where, value, f"is a {type(value).__name__}", f"write a {names}")
        elif type(value) in (int, float) and not value > 0:
            yield _error(where, value, "is not above 0", "write a number above 0")


def _task_sources(spec: RLJobSpec, reward: Reward, path: str) -> Iterator[FieldError]:
    sources = [s for s in _all_sources(spec) if not reward.sources or s.name in reward.sources]
    others = [source.name for source in sources if source.type is not DataSourceType.REASONING_GYM]
    if others:
        problem = f"needs ReasoningGym sources, which verify themselves, but {', '.join(dict.fromkeys(others))} is of another type"
        yield _error(f"{path}.type", "Task", problem, "name its sources in `sources`, or use another type for the others")


def _tags(spec: RLJobSpec) -> Iterator[FieldError]:
    """Every tag that is known without the data has a reward, and every reward a tag; others are compared when the data is read."""
    if not spec.rewards or any(not reward.sources for reward in spec.rewards):
        scored = None
    else:
        scored = {tag for reward in spec.rewards for tag in reward.sources}
    for field, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            if scored is not None and not source.is_tagged and source.name not in scored:
                problem = f"has no reward: sources of the rewards are {', '.join(sorted(scored))}"
                remedy = "add it to the `sources` of a reward, or a reward without `sources`"
                yield _error(f"spec.data.{field}[{index}].name", source.name, problem, remedy)
    everything = _all_sources(spec)
    if any(source.is_tagged for source in everything):
        return
    names = list(dict.fromkeys(source.name for source in everything))
    for index, reward in enumerate(spec.rewards):
        for number, tag in enumerate(reward.sources):
            if tag not in names:
                remedy = did_you_mean(tag, names) or f"use {', '.join(names)}, or set jsonl.tagField"
                problem = "is the tag of no prompt: there is no such data source and none has a tagField"
                yield _error(f"spec.rewards[{index}].sources[{number}]", tag, problem, remedy)


def _all_sources(spec: RLJobSpec) -> tuple[DataSource, ...]:
    return (*spec.data.train, *spec.data.validation)


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_rewards, _tags)
"""Rules between fields, each independent of the others."""
