"""What the grid games have in common: parameters under ROLL's names, the text of the rules, the numbers of a turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rljob_runtime.environments.actions import ANSWER_PATTERN
from rljob_runtime.errors import EnvironmentSetupError


class TaskSettings(BaseModel):
    """Parameters of a built-in environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")


SettingsT = TypeVar("SettingsT", bound=TaskSettings)


class GridSettings(TaskSettings):
    """Parameters of both grid games."""

    render_mode: Literal["text"] = "text"
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Actions after which the game itself ends; None: only ``maxTurns`` of the environment ends it."""
    grid_lookup: Mapping[int, str]
    """Symbol of each kind of cell."""
    grid_vocab: Mapping[str, str]
    """Meaning of each symbol, for the instruction."""
    action_lookup: Mapping[int, str]
    """Name of each action."""
    env_instruction: str
    action_pattern: str = ANSWER_PATTERN
    """A regular expression with one group, the action, or two, the reasoning before it and the action."""
    special_token_list: tuple[str, ...] = ("<|im_start|>", "<|im_end|>")
    """Taken out of a response before an action is looked for."""
    format_penalty: float = 0.0
    """Reward of a response without an action."""

    def rules(self) -> str:
        """The instruction, with the meaning of the symbols and the actions."""
        symbols = ", ".join(f"{symbol}: {meaning}" for symbol, meaning in self.grid_vocab.items())
        return (
            f"{self.env_instruction}\nThe meaning of each symbol in the state is:\n{symbols}"
            f"\nYour available actions are:\n{', '.join(self.action_lookup.values())}"
        )


def read_settings(kind: type[SettingsT], name: str, parameters: Mapping[str, Any]) -> SettingsT:
    """Check the parameters of a built-in environment.

    Raises:
        EnvironmentSetupError: some are unknown or of no use; all are named.
    """
    try:
        return kind.model_validate(dict(parameters))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        known = ", ".join(kind.model_fields)
        raise EnvironmentSetupError(f"parameters of {name}: {problems}; known are {known}") from error


def check_keys(name: str, what: str, found: Mapping[int, str], needed: Mapping[int, str]) -> None:
    """Refuse a look-up table that lacks entries, or has some that nothing uses.

    Raises:
        EnvironmentSetupError: it does.
    """
    if set(found) != set(needed):
        raise EnvironmentSetupError(f"parameters of {name}: {what} has the keys {sorted(found)}; it must have {sorted(needed)}")
