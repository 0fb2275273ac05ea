"""What an environment does: one task in which a policy acts over several turns.

::

    reset(seed) -> observation ── policy ──> action ── step(action) ──> Turn(observation, reward, done)
                       ^                                                        |
                       └───────────────────── until done ───────────────────────┘

Users name theirs as ``module:Class``; it is constructed once per concurrent episode and used again after ``reset``. The same seed must
lead to the same task, so that all samples of a group meet the same one and a resumed run the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rljob_runtime.plugins import load_class

METHODS = ("reset", "step", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an action led to."""

    observation: str
    """What the policy reads next; of no use once the episode is done."""
    reward: float = 0.0
    """For this action alone; an episode's score is their sum."""
    done: bool = False
    """Whether the episode is over."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics of a step, such as ``solved``."""


class Environment(Protocol):
    """One task at a time. Calls of one environment never overlap; those of different ones do."""

    async def reset(self, seed: int) -> str:
        """Begin the episode of a seed; returns its first observation."""

    async def step(self, action: str) -> Turn:
        """Act: the text that the policy generated since the last observation."""

    async def close(self) -> None:
        """Give up what it holds; called once, also after an error."""


def make_environment(reference: str, folder: Path | None, parameters: Mapping[str, Any]) -> Environment:
    """Construct an environment of the user's own.

    Args:
        reference: ``module:Class``.
        folder: searched before the Python path.
        parameters: keyword arguments of the class.

    Raises:
        PluginError: no such module or class, a method is missing, or the class does not take these parameters.
    """
    environment: Environment = load_class(reference, None if folder is None else str(folder), METHODS, parameters)(**parameters)
    return environment
