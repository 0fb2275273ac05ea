"""Reasoning-gym tasks: created by name with checked parameters, entries generated on demand.

``reasoning_gym`` is imported on first use only: it pulls in sympy and matplotlib and takes about a second.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rljob_runtime.data.config import ReasoningGymSource
from rljob_runtime.data.rows import Row
from rljob_runtime.errors import DataError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

TASK_KEY = "reasoning_gym_task"
PARAMS_KEY = "reasoning_gym_params"
ENTRY_KEY = "reasoning_gym_entry"
"""Keys of ``Prompt.metadata`` that let the ``Task`` reward rebuild the task and score against the entry."""

_OWN_FIELDS = frozenset({"seed", "size"})


def create_task(name: str, params: Mapping[str, object], *, seed: int, size: int) -> ProceduralDataset:
    """Return the task's dataset; raises DataError for an unknown task, an unknown parameter or a refused value."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        nearest = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else "none is similar;"
        raise DataError(f"reasoning-gym has no task {name!r}; {hint} (reasoning-gym {reasoning_gym.__version__} has {len(DATASETS)} tasks)")
    valid = sorted(f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in _OWN_FIELDS)
    unknown = sorted(set(params) - set(valid))
    if unknown:
        own = " (seed and size are fields of the source itself)" if _OWN_FIELDS & set(unknown) else ""
        raise DataError(f"reasoning-gym task {name!r} has no parameter {', '.join(map(repr, unknown))}{own}; it takes: {', '.join(valid)}")
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **params)
    except (AssertionError, TypeError, ValueError) as error:
        detail = str(error) or type(error).__name__
        raise DataError(
            f"reasoning-gym task {name!r} refused its parameters {dict(params)}: {detail}; it takes: {', '.join(valid)}"
        ) from error


class ReasoningGymRows:
    """The entries of one task as rows, generated when asked for."""

    def __init__(self, source: ReasoningGymSource, *, seed: int) -> None:
        """``seed`` applies when the source names none. Raises DataError as ``create_task`` does."""
        own_seed = seed if source.seed is None else source.seed
        try:
            self._dataset = create_task(source.task, source.params, seed=own_seed, size=source.size)
        except DataError as error:
            raise DataError(f"data source {source.name!r}: {error}") from error
        self._task = source.task
        self._params = dict(source.params)

    def __len__(self) -> int:
        """Return the number of distinct entries."""
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        """Generate entry ``index``, the same one every time."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        entry = self._dataset[index]
        # Some tasks carry no single right answer (None): they verify themselves from the entry.
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return Row(
            question=str(entry["question"]),
            answer=answer,
            metadata={TASK_KEY: self._task, PARAMS_KEY: self._params, ENTRY_KEY: entry},
        )
