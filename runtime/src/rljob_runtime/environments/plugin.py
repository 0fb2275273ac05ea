"""An environment of the user's own as a :class:`Task`, whatever interface it has.

===================================  ==================================================================================================
interface                            how it is used
===================================  ==================================================================================================
:class:`.protocol.Environment`       ``reset(seed)`` returns a text or a ``Turn``, ``step(action)`` a ``Turn``; plain or ``async``
``gymnasium.Env`` with texts         ``reset(seed=seed)`` returns (observation, info), ``step(action)`` the five values; of ``info`` count
                                     ``metrics`` (else all numbers), ``metrics_agg_mode``, ``env_instruction``, ``suffix``, ``use_tool``
``gymnasium.Env`` with numbers       a ``Discrete`` action is looked for in the response and looked up, by ``action_pattern``,
                                     ``action_lookup``, ``special_token_list``, ``format_penalty`` and ``env_instruction`` among the
                                     parameters, which the class itself does not get; what it renders as text is the observation, else
                                     the observation's own text
===================================  ==================================================================================================
"""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import Any, get_args

from rljob_runtime.environments.actions import ANSWER_PATTERN, ActionParser, action_parser
from rljob_runtime.environments.protocol import METHODS, Aggregation, Turn, make_environment
from rljob_runtime.errors import EnvironmentSetupError
from rljob_runtime.plugins import find_class

_OURS = ("action_pattern", "action_lookup", "special_token_list", "format_penalty", "env_instruction")


class PluginTask:
    """One environment of the user's; its coroutines run on a loop of its own."""

    def __init__(self, reference: str, folder: Path | None, parameters: Mapping[str, Any]) -> None:
        """Construct it; raises PluginError where that cannot be, EnvironmentSetupError where its actions can be no texts."""
        ours, theirs = _split(reference, folder, parameters)
        self._reference = reference
        self._runner = asyncio.Runner()
        self._environment = make_environment(reference, folder, theirs)
        self._discrete = _discrete(self._environment, ours, reference)
        self._last = ""

    def reset(self, seed: int) -> Turn:
        """Begin the episode of a seed."""
        turn = self._turn("reset", self._call(self._environment.reset, seed=seed))
        self._last = turn.observation
        return turn

    def step(self, action: str) -> Turn:
        """Act."""
        if self._discrete is None:
            turn = self._turn("step", self._call(self._environment.step, action))
        elif (number := self._discrete.parser.number(action)) is None:
            return Turn(observation=self._last, reward=self._discrete.format_penalty, action_valid=False)
        else:
            turn = self._turn("step", self._call(self._environment.step, number))
        self._last = turn.observation
        return turn

    def close(self) -> None:
        """Let it give up what it holds."""
        try:
            self._call(self._environment.close)
        finally:
            self._runner.close()

    def _call(self, method: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        result = method(*arguments, **keywords)
        return self._runner.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _turn(self, method: str, result: Any) -> Turn:
        """Whatever a method returned, as a turn.

        Raises:
            TypeError: it is nothing that this method may return.
        """
        if isinstance(result, str) and method == "reset":
            result = Turn(observation=result)
        elif isinstance(result, tuple) and method == "reset" and len(result) == 2:
            result = self._from_gymnasium(result[0], 0.0, False, result[1])
        elif isinstance(result, tuple) and method == "step" and len(result) == 5:
            observation, reward, terminated, truncated, info = result
            result = self._from_gymnasium(observation, reward, bool(terminated) or bool(truncated), info)
        if not isinstance(result, Turn):
            wanted = "a text, a Turn, or (observation, info)" if method == "reset" else "a Turn, or the five values of gymnasium.Env"
            raise TypeError(f"{self._reference}.{method} returned {type(result).__name__}; it must return {wanted}")
        _check(result, f"{self._reference}.{method}")
        return result

    def _from_gymnasium(self, observation: Any, reward: Any, done: bool, info: Mapping[str, Any]) -> Turn:
        metrics = info.get("metrics", info)
        numbers = {str(name): float(value) for name, value in metrics.items() if isinstance(value, Number) or hasattr(value, "__float__")}
        instruction = info.get("env_instruction", "")
        if self._discrete is not None:
            instruction = instruction or self._discrete.instruction
            shown = self._environment.render() if getattr(self._environment, "render_mode", None) in ("ansi", "text") else observation
            observation = shown if isinstance(shown, str) else str(shown)
        return Turn(
            observation=observation,
            reward=float(reward),
            done=done,
            info=numbers,
            aggregation=dict(info.get("metrics_agg_mode", {})),
            instruction=str(instruction),
            suffix=str(info.get("suffix", "")),
            role="tool" if info.get("use_tool") else "user",
            action_valid=bool(numbers.get("action_is_valid", True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Discrete:
    """How a response becomes the number that an environment wants."""

    parser: ActionParser
    format_penalty: float
    instruction: str


def _split(reference: str, folder: Path | None, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters that are ours, because the class does not take them, and the class's."""
    accepted = inspect.signature(find_class(reference, None if folder is None else str(folder), METHODS)).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    ours = {name: value for name, value in parameters.items() if name in _OURS and name not in accepted and not takes_all}
    return ours, {name: value for name, value in parameters.items() if name not in ours}


def _discrete(environment: Any, ours: Mapping[str, Any], reference: str) -> _Discrete | None:
    """The look-up of an environment whose actions are numbers; None where they are texts.

    Raises:
        EnvironmentSetupError: they are neither, or parameters are given that only numbers need.
    """
    gymnasium = sys.modules.get("gymnasium")  # the module of a gymnasium.Env has imported it
    space = getattr(environment, "action_space", None)
    if gymnasium is None or space is None or not isinstance(space, gymnasium.Space) or isinstance(space, gymnasium.spaces.Text):
        if ours:
            raise EnvironmentSetupError(f"{reference} takes no parameter {', '.join(ours)}, and its actions are texts; leave them out")
        return None
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise EnvironmentSetupError(
            f"{reference} has actions of {space}, and a policy writes text; wrap it in a gymnasium.Env whose step takes text (spaces.Text)"
        )
    first = int(space.start)
    names = {number: str(number) for number in range(first, first + int(space.n))}
    lookup = {int(number): str(name) for number, name in ours.get("action_lookup", names).items()}
    if unknown := sorted(set(lookup) - set(names)):
        raise EnvironmentSetupError(f"action_lookup names the actions {unknown}, and {reference} has {space}; name only those it has")
    removed = tuple(ours.get("special_token_list", ()))
    return _Discrete(
        parser=action_parser(ours.get("action_pattern", ANSWER_PATTERN), lookup, removed),
        format_penalty=float(ours.get("format_penalty", 0.0)),
        instruction=str(ours.get("env_instruction", "")),
    )


def _check(turn: Turn, where: str) -> None:
    """Refuse values that no prompt, batch or report can take.

    Raises:
        TypeError: a text is none.
        ValueError: a number is none, or not finite.
    """
    for name in ("observation", "instruction", "suffix"):
        value = getattr(turn, name)
        if not isinstance(value, str):
            raise TypeError(f"{where}: {name} is {type(value).__name__}; a policy reads text, so return str")
    if not math.isfinite(turn.reward):
        raise ValueError(f"{where}: reward is {turn.reward}; it must be finite")
    for name, value in turn.info.items():
        if not math.isfinite(value):
            raise ValueError(f"{where}: {name} is {value}; it must be finite")
    if turn.role not in ("user", "tool"):
        raise ValueError(f"{where}: role is {turn.role!r}; it must be user or tool")
    for name, mode in turn.aggregation.items():
        if mode not in get_args(Aggregation):
            raise ValueError(f"{where}: {name} is aggregated by {mode!r}; use one of {', '.join(get_args(Aggregation))}")


async def _awaited(result: Any) -> Any:
    return await result
