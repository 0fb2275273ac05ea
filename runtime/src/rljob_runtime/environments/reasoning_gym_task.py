"""A task of reasoning-gym as an environment: a question, and as many attempts as allowed to answer it.

Runs in a sandboxed process, because scores of some tasks evaluate what the policy wrote: ``eval`` in n_queens, spiral_matrix, binary_matrix
and string_insertion, SymPy's ``parse_expr`` in countdown, puzzle24, polynomial_multiplication and both kinds of integrals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rljob_runtime.data.reasoning_gym_source import create_task
from rljob_runtime.environments.actions import ANSWER_PATTERN, action_parser
from rljob_runtime.environments.grid_settings import TaskSettings, read_settings
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.errors import DataError, EnvironmentSetupError


class ReasoningGymSettings(TaskSettings):
    """Parameters of ReasoningGym."""

    task: str
    """Name of the task."""
    size: Annotated[int, Field(ge=1)] = 500
    """Number of entries; an episode's seed chooses one."""
    seed: Annotated[int, Field(ge=0)] = 42
    """Of the entries."""
    parameters: Mapping[str, Any] = {}
    """Of the task."""
    max_attempts: Annotated[int, Field(ge=1)] = 1
    pass_score: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Score from which on an answer counts as right, and no further attempt is asked for."""
    action_pattern: str = ANSWER_PATTERN
    """A regular expression with a group for the answer."""
    special_token_list: tuple[str, ...] = ()
    format_penalty: float = 0.0
    """Reward of a response without an answer."""
    retry_text: str = "That is not right. Try again."
    """Observation after an answer that is wrong, or missing."""


class ReasoningGym:
    """One entry at a time."""

    def __init__(self, **parameters: Any) -> None:
        """Raise EnvironmentSetupError when a parameter is unknown or of no use."""
        self._settings = settings = read_settings(ReasoningGymSettings, "ReasoningGym", parameters)
        self._parser = action_parser(settings.action_pattern, {}, settings.special_token_list)
        try:
            self._tasks = create_task(settings.task, settings.parameters, seed=settings.seed, size=settings.size)
        except DataError as error:
            raise EnvironmentSetupError(f"parameters of ReasoningGym: {error}") from error

    def reset(self, seed: int) -> Turn:
        """Begin the episode of a seed."""
        self._entry, self._attempts = self._tasks[seed % self._settings.size], 0
        return Turn(observation=re.sub(r"\s+\Z", "", str(self._entry["question"])))

    def step(self, action: str) -> Turn:
        """Score an answer; the reward is the score of the last attempt."""
        self._attempts += 1
        answer = self._parser.text(action)
        score = 0.0 if answer is None else float(self._tasks.score_answer(answer, self._entry))
        right = score >= self._settings.pass_score
        done = right or self._attempts == self._settings.max_attempts
        return Turn(
            observation="" if done else self._settings.retry_text,
            reward=self._settings.format_penalty if answer is None else score if done else 0.0,
            done=done,
            info={"success": float(right), "score": score, "action_is_valid": float(answer is not None)},
            aggregation={"score": "last"},
            action_valid=answer is not None,
            state_key=f"{self._entry['metadata'].get('source_index', '')}:{self._attempts}:{self._entry['question']}",
        )

    def close(self) -> None:
        """Nothing is held."""
