"""Rules about agentic jobs: their environments, what is theirs alone, and what belongs to jobs with data and rewards."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rljob_api import paths
from rljob_api.errors import FieldError, did_you_mean
from rljob_api.errors import field_error as _error
from rljob_api.rules.harness import TURN_ESTIMATORS, harness_problems
from rljob_api.v1alpha1.base import FUNCTION_PATTERN
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.conversations import ConversationParameters, Scoring, Tool
from rljob_api.v1alpha1.data import PromptFormat
from rljob_api.v1alpha1.environments import PARAMETERS, ActionParameters, Environment, EnvironmentPrompt
from rljob_api.v1alpha1.rljob import Pipeline, RLJobSpec
from rljob_api.vocabulary import EnvironmentType, PromptHistory, PromptMemory

KEPT = ("observation", "turn_idx", "actions_left", "max_response_length", "suffix")
"""What a turn's message may contain where all turns are kept."""
OF_ONE_TURN = (*KEPT, "env_instruction", "current_observation", "history", "history_length", "step_count", "current_step")
"""What it may contain where each turn is a prompt of its own."""
_OWN_CLASS_ONLY = ("network", "processes", "read_paths", "memory_bytes", "disk_bytes", "max_processes", "episodes_per_process")
_CONVERSATIONS_TOO = ("network", "processes", "read_paths", "memory_bytes", "disk_bytes", "max_processes")
"""They are for the processes of a conversation's tools, user and score as well."""
OBSERVATIONS = ("observation", "current_observation")
_CONVERSATIONS = tuple(kind for kind, model in PARAMETERS.items() if issubclass(model, ConversationParameters))
_BELOW: Mapping[str, type[BaseModel]] = {"tools": Tool, "reward": Scoring}
"""What stands below a parameter."""


def _belongs(spec: RLJobSpec) -> Iterator[FieldError]:
    """Environments make an agentic job, and nothing of them is in another one."""
    if spec.pipeline is Pipeline.AGENTIC:
        if not spec.environments:
            remedy = "add at least one, for example {name: lake, type: FrozenLake}"
            yield _error("spec.environments", None, "is empty, and an agentic job has its prompts from environments", remedy)
        if not spec.with_role(Role.ENVIRONMENT):
            remedy = "add {name: environment, role: Environment, placement: {workers: 1}}"
            yield _error("spec.components", None, "has no Environment component to run spec.environments in", remedy)
        return
    if spec.environments:
        problem = f"has no effect with pipeline {spec.pipeline}, whose prompts are those of spec.data"
        yield _error("spec.environments", None, problem, "remove it, or write pipeline: Agentic")
    for index, component in spec.with_role(Role.ENVIRONMENT):
        problem = f"{component.name} would do nothing, pipeline is {spec.pipeline}"
        yield _error(f"spec.components[{index}].role", component.role, problem, "remove the component, or write pipeline: Agentic")
    estimator = spec.algorithm.advantage.estimator
    if estimator in TURN_ESTIMATORS:
        problem = f"gives turns their advantages, and a response of pipeline {spec.pipeline} is a single one"
        yield _error("spec.algorithm.advantage.estimator", estimator, problem, "write GRPO or Reinforce, or pipeline: Agentic")


def _of_other_jobs(spec: RLJobSpec) -> Iterator[FieldError]:
    """Prompts, rewards and what measures a single response."""
    if spec.pipeline is not Pipeline.AGENTIC:
        return
    for field in ("train", "validation"):
        if getattr(spec.data, field):
            problem = "has no effect: the prompts of an agentic job are those of its environments"
            yield _error(f"spec.data.{field}", None, problem, "remove it, or write pipeline: RLVR")
    if spec.data.prompt != PromptFormat():
        problem = "has no effect: what the policy of an agentic job reads is in environments[].prompt"
        yield _error("spec.data.prompt", None, problem, "remove it")
    if spec.rewards:
        problem = "has no effect: an agentic job is scored by its environments"
        yield _error("spec.rewards", None, problem, "remove it, or give the score as reward of the environment's last step")
    for index, component in spec.with_role(Role.REWARD):
        problem = f"{component.name} would do nothing: an agentic job is scored by its environments"
        yield _error(f"spec.components[{index}].role", component.role, problem, "remove the component")
    if spec.algorithm.reward.overlong is not None:
        problem = "has no effect: it measures a single response, and an episode has one for each turn"
        yield _error("spec.algorithm.reward.overlong", None, problem, "remove it, or write pipeline: RLVR")
    if spec.algorithm.filters.max_failed_tokens is not None:
        problem = "has no effect: it measures a single response, and an episode has one for each turn"
        path = "spec.algorithm.filters.maxFailedTokens"
        yield _error(path, spec.algorithm.filters.max_failed_tokens, problem, "remove it, or write pipeline: RLVR")


def _shares(spec: RLJobSpec) -> Iterator[FieldError]:
    """Who is played when."""
    if not spec.environments:
        return
    validates = spec.validates_only or spec.validation.every_steps > 0
    for index, environment in enumerate(spec.environments):
        path = f"spec.environments[{index}]"
        if environment.share == 0 and environment.validation_share == 0:
            yield _error(f"{path}.share", 0, "is 0 and so is validationShare: it is never played", "give one of them, or remove the entry")
        elif environment.validation_share > 0 and not validates:
            problem = "has no effect, validation.everySteps is 0"
            yield _error(f"{path}.validationShare", environment.validation_share, problem, "remove it, or set validation.everySteps")
    if not spec.validates_only and not any(environment.share for environment in spec.environments):
        remedy = "give one a share above 0, or write training.steps: 0 to validate the model alone"
        yield _error("spec.environments", None, "is only for validation: every share is 0, and there is nothing to train on", remedy)
    if validates and not any(environment.validation_share for environment in spec.environments):
        problem = "has nothing to validate with: every validationShare is 0"
        yield _error("spec.environments", None, problem, "give one a validationShare, or write validation.everySteps: 0")


def _limits(spec: RLJobSpec) -> Iterator[FieldError]:
    room = spec.rollout.max_response_tokens
    for index, environment in enumerate(spec.environments):
        path, tokens = f"spec.environments[{index}]", environment.max_tokens_per_turn
        if tokens is not None and tokens > room:
            problem = f"is more than rollout.maxResponseTokens ({room}), for which engines have room"
            yield _error(f"{path}.maxTokensPerTurn", tokens, problem, f"use at most {room}, or raise rollout.maxResponseTokens")
        step, episode = environment.step_timeout_seconds, environment.episode_timeout_seconds
        if step > episode:
            problem = f"is more than episodeTimeoutSeconds ({episode:g}), which ends the episode before"
            yield _error(f"{path}.stepTimeoutSeconds", step, problem, f"use at most {episode:g}, or raise episodeTimeoutSeconds")


def _types(spec: RLJobSpec) -> Iterator[FieldError]:
    """Built-in types with their parameters; the class of a user's own is imported where it runs."""
    builtin = {kind.value: kind for kind in EnvironmentType}
    for index, environment in enumerate(spec.environments):
        path = f"spec.environments[{index}]"
        yield from harness_problems(spec, environment, path)
        if environment.type == EnvironmentType.HARNESS:
            continue
        if environment.type in builtin:
            yield from _parameters(builtin[environment.type], environment, path)
            yield from _isolation(environment, path)
        elif not re.fullmatch(FUNCTION_PATTERN, environment.type):
            near = did_you_mean(environment.type, builtin)
            remedy = near or "write module:Class of an environment of your own, for example my_games:Chess"
            yield _error(f"{path}.type", environment.type, f"is none of {', '.join(builtin)} and no module:Class", remedy)


def _parameters(kind: EnvironmentType, environment: Environment, path: str) -> Iterator[FieldError]:
    model = PARAMETERS[kind]
    try:
        known = model.model_validate_json(json.dumps(environment.parameters))
    except ValidationError as failure:
        for item in failure.errors(include_url=False):
            yield _parameter_error(kind, item, path)
        return
    if isinstance(known, ConversationParameters):
        for name in () if known.has_own_code else ("network", "processes", "read_paths"):
            if getattr(environment, name):
                problem = "has no effect: no function and no user of this environment is your own"
                yield _error(f"{path}.{Environment.model_fields[name].alias}", getattr(environment, name), problem, "remove it")
    if not isinstance(known, ActionParameters):
        return
    try:
        groups = re.compile(known.action_pattern).groups
    except re.error as error:
        where = f"{path}.parameters.action_pattern"
        yield _error(where, known.action_pattern, f"is not a regular expression: {error}", "correct it, for example <answer>(.*?)</answer>")
        return
    if groups not in (1, 2):
        where = f"{path}.parameters.action_pattern"
        problem = f"has {groups} groups; one is the action, of two the second"
        yield _error(where, known.action_pattern, problem, "put parentheses around the action alone, for example <answer>(.*?)</answer>")


def _isolation(environment: Environment, path: str) -> Iterator[FieldError]:
    """A game has no process of its own."""
    processes = issubclass(PARAMETERS[EnvironmentType(environment.type)], ConversationParameters)
    for name in _OWN_CLASS_ONLY:
        if processes and name in _CONVERSATIONS_TOO:
            continue
        field, value = Environment.model_fields[name], getattr(environment, name)
        if value != field.default:
            yield _error(f"{path}.{field.alias}", value, f"is for a module:Class, the type is {environment.type}", "remove it")


def _parameter_error(kind: EnvironmentType, item: Any, path: str) -> FieldError:
    """A problem of pydantic's as one of the manifest."""
    place = tuple(item["loc"])
    where = f"{path}.parameters{'.' if place else ''}{paths.join(place)}"
    if item["type"] == "extra_forbidden":
        model = _BELOW.get(str(place[0]), PARAMETERS[kind]) if len(place) > 1 else PARAMETERS[kind]
        names = list(model.model_fields)
        remedy = did_you_mean(str(place[-1]), names) or f"it takes {', '.join(names)}"
        return _error(where, item["input"], f"is not a parameter of type {kind}" if len(place) == 1 else "is unknown there", remedy)
    remedy = f"correct it, see type {kind} in docs/agents.md"
    if item["type"] == "value_error":  # our own sentence: the problem, a semicolon, the remedy
        problem, _, own = str(item["ctx"]["error"]).partition("; ")
        return _error(where, None, problem, own or remedy)
    return _error(where, item["input"], f"cannot be used: {item['msg'].lower()}", remedy)


def _prompts(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, environment in enumerate(spec.environments):
        prompt, path = environment.prompt, f"spec.environments[{index}].prompt"
        if prompt.history is PromptHistory.KEEP and prompt.memory_turns:
            problem = "has no effect with history Keep, which shows all turns"
            yield _error(f"{path}.memoryTurns", prompt.memory_turns, problem, "remove it, or write history: Turn")
        if prompt.history is PromptHistory.TURN and environment.type in _CONVERSATIONS:
            problem = f"is for environments with an observation a turn; {environment.type} is one conversation"
            yield _error(f"{path}.history", prompt.history, problem, "write history: Keep")
        yield from _unseen(prompt, path)
        if prompt.system and not prompt.chat_template:
            yield _error(f"{path}.system", prompt.system, "has no effect without a chat template", "remove it, or write chatTemplate: true")
        yield from _turn(prompt, f"{path}.turn")


def _unseen(prompt: EnvironmentPrompt, path: str) -> Iterator[FieldError]:
    """What a turn with a prompt of its own would not show."""
    if not prompt.memory_turns:
        if prompt.memory is not PromptMemory.TURNS:
            yield _error(f"{path}.memory", prompt.memory, "has no effect, memoryTurns is 0", "remove it, or set memoryTurns")
    elif prompt.history is PromptHistory.TURN and not any(f"{{{name}}}" in prompt.turn for name in ("history", "history_length")):
        remedy = "put {history} into turn, or remove it"
        yield _error(f"{path}.memoryTurns", prompt.memory_turns, "has no effect: turn does not contain {history}", remedy)
    if prompt.instruction and prompt.history is PromptHistory.TURN and "{env_instruction}" not in prompt.turn:
        problem = "has no effect: with history Turn it stands where turn contains {env_instruction}"
        yield _error(f"{path}.instruction", prompt.instruction, problem, "put {env_instruction} into turn, or remove it")


def _turn(prompt: EnvironmentPrompt, path: str) -> Iterator[FieldError]:
    """The message of a turn is a Python format string with plain fields."""
    known = KEPT if prompt.history is PromptHistory.KEEP else OF_ONE_TURN
    try:
        names = placeholders(prompt.turn)
    except ValueError as error:
        yield _error(path, prompt.turn, f"is not a template: {error}", "write literal braces as {{ and }}")
        return
    if not any(name in OBSERVATIONS for name in names):
        yield _error(path, prompt.turn, "does not contain {observation}", "put {observation} where the observation belongs")
    for name in names:
        problem = f"contains the placeholder {{{name}}}"
        if name in known:
            continue
        if name in OF_ONE_TURN:
            yield _error(path, prompt.turn, f"{problem}, which is for history Turn", "remove it, or write history: Turn")
            continue
        remedy = did_you_mean(name, known) or f"filled in are {', '.join(known)}; write literal braces as {{{{ and }}}}"
        yield _error(path, prompt.turn, problem, remedy)


def placeholders(template: str) -> list[str]:
    """What stands in braces in a message, with conversion and format, which no placeholder has.

    Raises:
        ValueError: braces that do not belong together.
    """
    pieces = [piece[1:] for piece in string.Formatter().parse(template) if piece[1] is not None]
    return [f"{name}{f'!{conversion}' if conversion else ''}{f':{form}' if form else ''}" for name, form, conversion in pieces]


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _belongs,
    _of_other_jobs,
    _shares,
    _limits,
    _types,
    _prompts,
)
"""Rules between fields, each independent of the others."""
