"""The actions of a step's episodes: what estimators that give each turn an advantage of its own compare; numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rljob_runtime.losses.normalize import DoubleArray
from rljob_runtime.overlap.arrange import Number
from rljob_runtime.records import IntArray, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTurns:
    """N actions: those of the first sample in the order of time, then those of the second."""

    sizes: IntArray
    """Shape (N,): tokens of each action."""
    rewards: DoubleArray
    """Shape (N,): what each earned; those of a sample sum to its score and what was added to it."""
    samples: IntArray
    """Shape (N,): which of the S samples."""
    states: IntArray
    """Shape (N,): equal where the actions were taken in the same state; a number of its own where the state is not known."""
    places: npt.NDArray[np.int64]
    """Shape (N,): where each stands among the sampled segments as they are written, one sequence of an episode after another."""

    def as_written(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Values of actions, shape (N,), in the order in which their tokens are written."""
        written = np.empty_like(values)
        written[self.places] = values
        return written


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
    places: list[int] = []
    known: dict[str, int] = {}
    for sample, (trajectory, more) in enumerate(zip(trajectories, added.tolist(), strict=True)):
        actions = trajectory.actions
        places += [len(sizes) + place for place in trajectory.time_order]
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
        places=np.array(places, dtype=np.int64),
    )


def tokens_in_time(trajectories: Sequence[Trajectory]) -> npt.NDArray[np.int64] | None:
    """Shape (sampled tokens,): where the tokens of each sample's actions are written, in the order of time; None where that is the same."""
    orders = [trajectory.time_order for trajectory in trajectories]
    if all(order == sorted(order) for order in orders):
        return None
    places: list[npt.NDArray[np.int64]] = []
    begin = 0
    for trajectory, order in zip(trajectories, orders, strict=True):
        sizes = [len(segment) for segment in trajectory.segments if segment.sampled]
        starts = [begin, *(begin + end for end in np.cumsum(sizes).tolist())]
        places += [np.arange(starts[place], starts[place + 1]) for place in order]
        begin = starts[-1]
    return np.concatenate(places)
