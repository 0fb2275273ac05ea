"""The tasks of an agent program: a file of JSON Lines, of which an episode's seed chooses one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rljob_runtime.data.surrogates import half_pair
from rljob_runtime.errors import EnvironmentSetupError

_MAX_REPORTED = 5


class TaskFile:
    """Its rows; without a file the seed is all there is."""

    def __init__(self, path: Path | None) -> None:
        """Read it.

        Raises:
            EnvironmentSetupError: it cannot be read, is empty, or has lines that are no JSON objects or hold what is no character.
        """
        self._rows = [] if path is None else _rows(path)

    def task(self, environment: str, seed: int) -> dict[str, Any]:
        """What the program of an episode is given; the same seed is the same task."""
        known: dict[str, Any] = {"environment": environment, "seed": seed}
        return known | {"task": self._rows[seed % len(self._rows)]} if self._rows else known


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise EnvironmentSetupError(f"harness.tasks: {path} cannot be read: {error.strerror}; name a file that every node has") from error
    rows, bad = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            bad.append(str(number))
        elif (problem := half_pair(line, row)) is not None:
            raise EnvironmentSetupError(f"harness.tasks: line {number} of {path}: {problem}")
        else:
            rows.append(row)
    if bad:
        shown = ", ".join(bad[:_MAX_REPORTED])
        raise EnvironmentSetupError(f"harness.tasks: {len(bad)} of {len(lines)} lines of {path} are no JSON objects, such as line {shown}")
    if not rows:
        raise EnvironmentSetupError(f"harness.tasks: {path} holds no tasks; write one JSON object per line")
    return rows
