"""Turns that are prompts of their own: what one shows of those before it, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.vocabulary import PromptMemory

FIELDS = ("env_instruction", "current_observation", "history", "history_length", "step_count", "current_step")
"""What such a turn's template may name besides what every template may; ROLL's names."""
_NOT_VALID = " (this action was not valid: follow the format that is asked for)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a turn shows of those before it."""

    turns: int = 0
    """So many turns back."""
    kind: PromptMemory = PromptMemory.TURNS


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """A turn that is over."""

    number: int
    """From 1 on."""
    observation: str
    """What was shown before the action."""
    action: str
    reward: float
    action_valid: bool


def fields(memory: Memory, past: Sequence[PastTurn], *, instruction: str, observation: str, taken: int) -> Mapping[str, str | int]:
    """The values of ``FIELDS``.

    Args:
        memory: what is shown of ``past``.
        past: the last turns, oldest first; ``memory.turns`` of them, where there were as many.
        instruction: of the environment.
        observation: what the next action is about.
        taken: actions so far.
    """
    return {
        "env_instruction": instruction,
        "current_observation": observation,
        "history": _history(memory.kind, past),
        "history_length": len(past),
        "step_count": taken,
        "current_step": taken + 1,
    }


def _history(kind: PromptMemory, past: Sequence[PastTurn]) -> str:
    match kind:
        case PromptMemory.OBSERVATIONS:
            return "\n".join(turn.observation for turn in past)
        case PromptMemory.INVALID_TURNS:
            return ", ".join(_entry(turn) for turn in past if not turn.action_valid)
        case PromptMemory.TURNS:
            return ", ".join(_entry(turn) for turn in past)


def _entry(turn: PastTurn) -> str:
    action = turn.action + ("" if turn.action_valid else _NOT_VALID)
    return f"(step: {turn.number}, observation: {turn.observation}, action: {action}, reward: {turn.reward:g})"
