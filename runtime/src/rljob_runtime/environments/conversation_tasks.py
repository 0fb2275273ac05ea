"""The tasks of a conversation: rows of a file, or entries of reasoning-gym, one for each seed."""

from __future__ import annotations

from pathlib import Path

from rljob_api.v1alpha1.conversations import SCRIPT, ChatParameters, ConversationParameters
from rljob_runtime.data.config import JsonlSource, ReasoningGymSource
from rljob_runtime.data.jsonl import read_rows
from rljob_runtime.data.reasoning_gym_source import ReasoningGymRows
from rljob_runtime.data.rows import Row
from rljob_runtime.environments.conversation import Task
from rljob_runtime.errors import DataError, EnvironmentSetupError


class Tasks:
    """Found by their seed."""

    def __init__(self, name: str, parameters: ConversationParameters) -> None:
        """Read them; raises EnvironmentSetupError where they cannot be read."""
        self._turns_field = None
        if isinstance(parameters, ChatParameters) and parameters.user == SCRIPT:
            self._turns_field = parameters.turns_field
        try:
            self._rows: ReasoningGymRows | list[Row] = self._read(name, parameters)
        except DataError as error:
            raise EnvironmentSetupError(f"environment {name!r}: {error}") from error
        if isinstance(self._rows, list):
            for number, row in enumerate(self._rows, start=1):
                self._check(row, f"environment {name!r}: {parameters.path}: row {number}")

    def of(self, seed: int) -> Task:
        """The task of a seed."""
        row = self._rows[seed % len(self._rows)]
        script = row.metadata.get(self._turns_field, ()) if self._turns_field is not None else ()
        return Task(prompt=row.question, answer=row.answer, metadata=row.metadata, script=tuple(script))  # type: ignore[arg-type]

    @staticmethod
    def _read(name: str, parameters: ConversationParameters) -> ReasoningGymRows | list[Row]:
        if parameters.path is not None:
            prompt, answer = parameters.prompt_field, parameters.answer_field
            return read_rows(JsonlSource(name=name, path=Path(parameters.path), prompt_field=prompt, answer_field=answer))
        source = ReasoningGymSource(name=name, task=str(parameters.task), params=parameters.parameters, size=parameters.size)
        return ReasoningGymRows(source, seed=parameters.seed)

    def _check(self, row: Row, where: str) -> None:
        turns = row.metadata.get(self._turns_field, []) if self._turns_field is not None else []
        if not isinstance(turns, list) or not all(isinstance(turn, str) and turn for turn in turns):
            raise EnvironmentSetupError(f"{where}: {self._turns_field!r} must be a list of texts, the user's further messages; correct it")
