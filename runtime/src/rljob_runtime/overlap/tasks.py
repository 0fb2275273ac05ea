"""The endless, seeded order of tasks: which environment the next group plays, and with which seed.

A task is a :class:`Prompt` without tokens yet: its environment is ``source``, its seed stands in the metadata, and the environment's first
reply brings the tokens. All members of a group have the same task. A seed is a function of (job seed, environment, number of the task
there) alone; those of validation are others, and the same in every validation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from rljob_runtime.errors import DataError
from rljob_runtime.overlap.episodes import SEED
from rljob_runtime.records import Prompt

TRAINING = "training"
VALIDATION = "validation"
_STATE_VERSION = 1


class TaskOrder:
    """Environments in proportion to their shares; ``restore(state())`` continues exactly."""

    def __init__(self, shares: Mapping[str, float], *, seed: int, purpose: str) -> None:
        """Start at the first task.

        Args:
            shares: of each environment that is played, above 0; only their proportions count.
            seed: of the job.
            purpose: ``TRAINING`` or ``VALIDATION``, whose seeds are disjoint.

        Raises:
            DataError: no environment is to be played.
        """
        self._shares = {name: share for name, share in shares.items() if share > 0}
        if not self._shares:
            raise DataError(f"environments: none has a share of {purpose}; give one a share above 0")
        self._seed, self._purpose = seed, purpose
        self._given = dict.fromkeys(self._shares, 0)

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` tasks."""
        return [self._next_one() for _ in range(count)]

    @property
    def fingerprint(self) -> str:
        """Identifies the order: shares, seed, purpose."""
        name = f"{self._seed}/{self._purpose}/{sorted(self._shares.items())}"
        return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()

    def state(self) -> dict[str, object]:
        """Its position, JSON-able."""
        return {"version": _STATE_VERSION, "given": dict(self._given)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue after ``state``.

        Raises:
            DataError: it is not a state of these environments.
        """
        given = state.get("given")
        if state.get("version") != _STATE_VERSION or not isinstance(given, Mapping) or set(given) != set(self._shares):
            raise DataError(
                f"environments: the saved position {dict(state)!r} is not one of {', '.join(self._shares)}; "
                "restore spec.environments as it was, or start a new run"
            )
        self._given = {name: int(given[name]) for name in self._shares}

    def _next_one(self) -> Prompt:
        # Largest deficit first: after n tasks every environment is within one of its exact share, with no random state to save.
        index, total = sum(self._given.values()), sum(self._shares.values())
        name = max(self._shares, key=lambda name: self._shares[name] / total * (index + 1) - self._given[name])
        number = self._given[name]
        self._given[name] += 1
        return Prompt(
            index=index,
            text="",
            token_ids=np.zeros(0, dtype=np.int32),
            answer="",
            source=name,
            metadata={SEED: task_seed(self._seed, self._purpose, name, number)},
        )


def task_seed(job_seed: int, purpose: str, environment: str, number: int) -> int:
    """31 bits; the highest one of them tells validation from training, so that they never meet."""
    name = f"{job_seed}/{purpose}/{environment}/{number}"
    low = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest()) >> 2
    return low | (1 << 30 if purpose == VALIDATION else 0)
