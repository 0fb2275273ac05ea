"""Returns and advantages per token or per step, from rewards per token or per step; numpy.

Token arrays here are compact: shape (N,), only the sampled tokens, responses one after another, ``lengths`` of shape (S,) sums to N.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rljob_runtime.losses.advantage import group_advantages
from rljob_runtime.losses.normalize import DoubleArray


def discounted_sums(values: npt.ArrayLike, lengths: npt.ArrayLike, factor: float) -> DoubleArray:
    """``G_t = x_t + factor * G_{t+1}`` within each response, 0 behind its end.

    Args:
        values: shape (N,).
        lengths: shape (S,), sums to N; may hold zeros.
        factor: in [0, 1].

    Returns:
        Shape (N,), float64.

    Raises:
        ValueError: lengths do not sum to N.
    """
    result = np.array(values, dtype=np.float64)
    sizes = np.asarray(lengths, dtype=np.int64)
    if result.shape != (int(sizes.sum()),):
        raise ValueError(f"values have shape {result.shape} but the lengths sum to {int(sizes.sum())}; pass one value per token")
    order = np.argsort(-sizes, kind="stable")
    ends, ordered = np.cumsum(sizes)[order], sizes[order]
    for back in range(2, int(sizes.max(initial=0)) + 1):  # all responses at once, from their last tokens to the front
        places = ends[: np.searchsorted(-ordered, -back, side="right")] - back
        result[places] += factor * result[places + 1]
    return result


def gae(
    rewards: npt.ArrayLike, values: npt.ArrayLike, lengths: npt.ArrayLike, *, gamma: float, lambda_: float
) -> tuple[DoubleArray, DoubleArray]:
    """Generalized advantage estimation, arXiv 1506.02438.

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lambda A_{t+1}``, return ``A_t + V_t``; V and A are 0 behind the end
    of a response, whether it ended by itself or was cut.

    Args:
        rewards: shape (N,).
        values: shape (N,), before each token is sampled.
        lengths: shape (S,), sums to N.
        gamma: discount per token.
        lambda_: 0 looks one token ahead, 1 to the end.

    Returns:
        Advantages and returns, each of shape (N,), float64.

    Raises:
        ValueError: shapes do not fit.
    """
    before = np.asarray(values, dtype=np.float64)
    gained = np.asarray(rewards, dtype=np.float64)
    sizes = np.asarray(lengths, dtype=np.int64)
    if before.shape != gained.shape:
        raise ValueError(f"values have shape {before.shape} and rewards {gained.shape}; pass one of each per token")
    after = np.append(before[1:], 0.0)[: before.size]
    after[np.cumsum(sizes)[sizes > 0] - 1] = 0.0
    advantages = discounted_sums(gained + gamma * after - before, sizes, gamma * lambda_)
    return advantages, advantages + before


def step_returns(rewards: npt.ArrayLike, trajectory_ids: npt.ArrayLike, gamma: float) -> DoubleArray:
    """Discounted sum of rewards from each step of a trajectory on: the advantage of StepReinforce.

    Args:
        rewards: shape (N,), one per step.
        trajectory_ids: shape (N,); steps of one trajectory are in order, those of others may lie between them.
        gamma: discount per step.

    Returns:
        Shape (N,), float64.

    Raises:
        ValueError: shapes differ.
    """
    gained, ids = np.asarray(rewards, dtype=np.float64), np.asarray(trajectory_ids)
    if gained.shape != ids.shape:
        raise ValueError(f"rewards have shape {gained.shape} and trajectory_ids {ids.shape}; pass one of each per step")
    order = np.argsort(ids, kind="stable")
    _, counts = np.unique(ids, return_counts=True)
    result = np.empty_like(gained)
    result[order] = discounted_sums(gained[order], counts, gamma)
    return result


def gigpo_advantages(
    rewards: npt.ArrayLike,
    trajectory_ids: npt.ArrayLike,
    group_ids: npt.ArrayLike,
    anchor_states: npt.ArrayLike,
    *,
    gamma: float = 0.95,
    episode_weight: float = 1.0,
    turn_weight: float = 1.0,
    per_turn: bool = False,
    normalize_std: bool = True,
) -> DoubleArray:
    """Group-in-group advantages of the steps of episodes, arXiv 2505.10978.

    ``A = episode_weight * A_episode + turn_weight * A_step``. The first compares a trajectory's sum of rewards with those of its group; the
    second compares the discounted return of a step with those of steps that the same group took from the same anchor state. Steps that
    share a state with none have ``A_step = 0``. States of different groups are never compared.

    Args:
        rewards: shape (N,), one per step.
        trajectory_ids: shape (N,), unique over groups; steps of one trajectory are in order.
        group_ids: shape (N,), equal means same task.
        anchor_states: shape (N,), numbers or strings; equal means same state of the environment before the step.
        gamma: discount per step of the step returns.
        episode_weight: of the episode term.
        turn_weight: of the step term; 0 is GRPO over episodes.
        per_turn: a trajectory counts once for each of its steps in the mean and deviation of its group's sums, as in ROLL; else once.
        normalize_std: divide each term by its group's standard deviation.

    Returns:
        Shape (N,), float64.

    Raises:
        ValueError: shapes differ or a reward is not finite.
    """
    gained, groups, ids = np.asarray(rewards, dtype=np.float64), np.asarray(group_ids), np.asarray(trajectory_ids)
    anchors = np.asarray(anchor_states)
    if len({gained.shape, groups.shape, ids.shape, anchors.shape}) > 1:
        raise ValueError(
            f"rewards have shape {gained.shape}, trajectory_ids {ids.shape}, group_ids {groups.shape} and anchor_states {anchors.shape}; "
            "pass one of each per step"
        )
    _, first, trajectory = np.unique(ids, return_index=True, return_inverse=True)
    sums = np.bincount(trajectory, gained, first.size)
    if per_turn:
        episodes = group_advantages(sums[trajectory], groups, normalize_std=normalize_std)
    else:
        episodes = group_advantages(sums, groups[first], normalize_std=normalize_std)[trajectory]
    _, state = np.unique(anchors, return_inverse=True)
    _, group = np.unique(groups, return_inverse=True)
    same_start = group * (int(state.max(initial=0)) + 1) + state
    steps = group_advantages(step_returns(gained, ids, gamma), same_start, normalize_std=normalize_std)
    return np.asarray(episode_weight * episodes.astype(np.float64) + turn_weight * steps.astype(np.float64))
