"""What an environment does: one task in which a policy acts over several turns.

::

    reset(seed) -> observation ── policy ──> action ── step(action) ──> Turn(observation, reward, done)
                       ^                                                        |
                       └───────────────────── until done ───────────────────────┘

Users name theirs as ``module:Class``; it is constructed once per concurrent episode, in a process of its own, and used again after
``reset``. The same seed must lead to the same task, so that all samples of a group meet the same one and a resumed run the same again.
Environments with the interface of ``gymnasium.Env`` come in through :mod:`.plugin`, the built-in ones lie in :mod:`.builtin`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rljob_runtime.plugins import load_class

METHODS = ("reset", "step", "close")

Aggregation = Literal["mean", "sum", "min", "max", "first", "last"]
"""How an episode's value of a number is made of those of its actions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What an action, or a reset, led to."""

    observation: str
    """What the policy reads next; of no use once the episode is done."""
    reward: float = 0.0
    """For this action alone; an episode's score is their sum."""
    done: bool = False
    """Whether the episode is over."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the metrics of a step, such as ``solved``."""
    aggregation: Mapping[str, Aggregation] = field(default_factory=dict)
    """Of the numbers in ``info`` whose value of an episode is not the mean; ``success`` and ``solved`` are the last without being named."""
    instruction: str = ""
    """At a reset: the rules of the task, in front of the first observation."""
    suffix: str = ""
    """Text for ``{suffix}`` of the turn's template."""
    role: Literal["user", "tool"] = "user"
    """Who says the observation: a ``tool`` result goes without the turn's template."""
    results: tuple[str, ...] = ()
    """With role ``tool``, each result as a message of its own; empty: the observation is the only one."""
    action_valid: bool = True
    """Whether the action was understood."""
    state_key: str | None = None
    """Equal for equal states of the task; None: the observation stands for the state."""


class Environment(Protocol):
    """One task at a time. Calls of one environment never overlap; those of different ones do.

    The methods may be plain ones as well; ``reset`` may return a :class:`Turn`, to give an instruction besides its observation.
    """

    async def reset(self, seed: int) -> str | Turn:
        """Begin the episode of a seed; returns its first observation."""

    async def step(self, action: str) -> Turn:
        """Act: the text that the policy generated since the last observation."""

    async def close(self) -> None:
        """Give up what it holds; called once, also after an error."""


class Task(Protocol):
    """What the runtime drives: a built-in environment, or one of the user's through :mod:`.plugin`."""

    def reset(self, seed: int) -> Turn:
        """Begin the episode of a seed."""

    def step(self, action: str) -> Turn:
        """Act."""

    def close(self) -> None:
        """Give up what it holds."""


def make_environment(reference: str, folder: Path | None, parameters: Mapping[str, Any]) -> Any:
    """Construct an environment of the user's own: an :class:`Environment`, or one with the interface of ``gymnasium.Env``.

    Args:
        reference: ``module:Class``.
        folder: searched before the Python path.
        parameters: keyword arguments of the class.

    Raises:
        PluginError: no such module or class, a method is missing, or the class does not take these parameters.
    """
    return load_class(reference, None if folder is None else str(folder), METHODS, parameters)(**parameters)
