"""Finds the action in a policy's text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rljob_runtime.errors import EnvironmentSetupError

ANSWER_PATTERN = "<answer>(.*?)</answer>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionParser:
    """The first match of a pattern, looked up among the actions without regard to case.

    Source of the rules: ROLL, ``agentic/env/parse_action_utils.py``.
    """

    pattern: re.Pattern[str]
    actions: Mapping[str, int]
    """Number of each action by its name in lower case; empty where any text is an action."""
    removed: tuple[str, ...]
    """Taken out of the text first: a model's special tokens."""

    def text(self, response: str) -> str | None:
        """What stands in the pattern's last group, stripped; None where nothing matches."""
        for token in self.removed:
            response = response.replace(token, "").strip()
        match = self.pattern.search(response)
        return None if match is None else (match.group(self.pattern.groups) or "").strip()

    def number(self, response: str) -> int | None:
        """The number of the action; None where it is none."""
        named = self.text(response)
        return None if named is None else self.actions.get(named.lower())


def action_parser(pattern: str, actions: Mapping[int, str], removed: tuple[str, ...]) -> ActionParser:
    """Make one.

    Args:
        pattern: a regular expression with one group, the action, or two, the reasoning before it and the action; a dot matches new lines.
        actions: name of each action by its number.
        removed: taken out of a response first.

    Raises:
        EnvironmentSetupError: the pattern is not a regular expression, has no group or too many, or two actions have one name.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise EnvironmentSetupError(f"action_pattern {pattern!r} is not a regular expression: {error}; correct it") from error
    if compiled.groups not in (1, 2):
        raise EnvironmentSetupError(
            f"action_pattern {pattern!r} has {compiled.groups} groups; write one around the action, or two, the first around the reasoning"
        )
    names = {name.lower(): number for number, name in actions.items()}
    if len(names) < len(actions):
        raise EnvironmentSetupError(f"action_lookup names two actions alike: {', '.join(sorted(actions.values()))}; case is not regarded")
    return ActionParser(pattern=compiled, actions=names, removed=removed)
