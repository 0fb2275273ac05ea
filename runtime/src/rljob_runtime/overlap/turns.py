"""The actions of a step's episodes: what estimators that give each turn an advantage of its own compare; numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.losses.normalize import DoubleArray
from rljob_runtime.records import IntArray, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTurns:
    """N actions: those of the first sample in order, then those of the second."""

    sizes: IntArray
    """Shape (N,): tokens of each action."""
    rewards: DoubleArray
    """Shape (N,): what each earned; those of a sample sum to its score and what was added to it."""
    samples: IntArray
    """Shape (N,): which of the S samples."""
    states: IntArray
    """Shape (N,): equal where the actions were taken in the same state; a number of its own where the state is not known."""


def turns_of(trajectories: Sequence[Trajectory], added: npt.NDArray[np.floating]) -> StepTurns:
    """The actions of these samples; what a score is besides the rewards of its actions, the last one has earned.

    Args:
        trajectories: S of them, with scores.
        added: shape (S,), to their scores; 0 leaves the rewards of actions exactly as they are.
    """
    sizes: list[int] = []
    rewards: list[float] = []
    samples: list[int] = []
    states: list[int] = []
    known: dict[str, int] = {}
    for sample, (trajectory, more) in enumerate(zip(trajectories, added.tolist(), strict=True)):
        actions = [segment for segment in trajectory.segments if segment.sampled]
        earned = [action.reward or 0.0 for action in actions]
        if earned:
            earned[-1] += (trajectory.reward.score or 0.0) - sum(earned) + more
        keys = [turn.state_key for turn in trajectory.episode.turns] if trajectory.episode is not None else []
        keys += [None] * (len(actions) - len(keys))  # an action whose environment never answered
        for action, key in zip(actions, keys, strict=False):
            states.append(-1 - len(states) if key is None else known.setdefault(key, len(known)))
            sizes.append(len(action))
            samples.append(sample)
        rewards += earned
    return StepTurns(
        sizes=np.array(sizes, dtype=np.int32),
        rewards=np.array(rewards, dtype=np.float64),
        samples=np.array(samples, dtype=np.int32),
        states=np.array(states, dtype=np.int32),
    )
