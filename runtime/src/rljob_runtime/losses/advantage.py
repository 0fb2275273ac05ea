"""Advantages of groups of responses to the same prompt; numpy, one number per sequence.

Called by the learning rule before a train batch is made. No critic: the group is the baseline.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rljob_runtime.records import FloatArray


def group_advantages(rewards: npt.ArrayLike, group_ids: npt.ArrayLike, *, normalize_std: bool = True, eps: float = 1e-6) -> FloatArray:
    """Center rewards by their group's mean and, if asked, divide by its standard deviation.

    ``A_i = (r_i - mean_g) / (std_g + eps)`` with the unbiased std: GRPO, arXiv 2402.03300, eq. 3. Without the division: Dr. GRPO,
    arXiv 2503.20783, section 3.2. A group whose rewards are all equal, so also a group of one, gets exactly 0.

    Args:
        rewards: shape (S,), finite.
        group_ids: shape (S,), any integers; equal means same prompt.
        normalize_std: divide by the group's standard deviation.
        eps: added to the standard deviation, in units of the reward.

    Returns:
        Shape (S,), float32.

    Raises:
        ValueError: shapes differ or a reward is not finite.
    """
    values, inverse, counts = _grouped(rewards, group_ids)
    mean = np.bincount(inverse, values, counts.size) / counts
    centered = values - mean[inverse]
    centered[_is_constant(values, inverse, counts.size)] = 0.0  # the mean rounds; eps alone would blow that up to a signal
    if normalize_std:
        variance = np.bincount(inverse, centered**2, counts.size) / np.maximum(counts - 1, 1)
        centered = centered / (np.sqrt(variance)[inverse] + eps)
    return centered.astype(np.float32)


def leave_one_out(rewards: npt.ArrayLike, group_ids: npt.ArrayLike) -> FloatArray:
    """Subtract the mean reward of the group's other members.

    ``A_i = r_i - (sum_g - r_i) / (n_g - 1)``: RLOO, arXiv 2402.14740, section 3.3. Equal rewards, and groups of one, give exactly 0.

    Args:
        rewards: shape (S,), finite.
        group_ids: shape (S,), any integers; equal means same prompt.

    Returns:
        Shape (S,), float32.

    Raises:
        ValueError: shapes differ or a reward is not finite.
    """
    values, inverse, counts = _grouped(rewards, group_ids)
    total = np.bincount(inverse, values, counts.size)
    others = (total[inverse] - values) / np.maximum(counts - 1, 1)[inverse]
    result = values - others
    result[_is_constant(values, inverse, counts.size)] = 0.0
    return result.astype(np.float32)


def _grouped(
    rewards: npt.ArrayLike, group_ids: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.intp], npt.NDArray[np.int64]]:
    """Rewards as float64, dense group index of each sequence, size of each group."""
    values = np.asarray(rewards, dtype=np.float64)
    ids = np.asarray(group_ids)
    if values.ndim != 1 or values.shape != ids.shape:
        raise ValueError(f"rewards have shape {values.shape} and group_ids {ids.shape}; both must be (S,)")
    if not np.isfinite(values).all():
        raise ValueError(f"reward {values[~np.isfinite(values)][0]} is not finite; drop failed rewards before computing advantages")
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    return values, inverse, counts.astype(np.int64)


def _is_constant(values: npt.NDArray[np.float64], inverse: npt.NDArray[np.intp], num_groups: int) -> npt.NDArray[np.bool_]:
    """Shape (S,): whether all rewards of the sequence's group are equal."""
    low = np.full(num_groups, np.inf)
    high = np.full(num_groups, -np.inf)
    np.minimum.at(low, inverse, values)
    np.maximum.at(high, inverse, values)
    constant: npt.NDArray[np.bool_] = (low == high)[inverse]
    return constant
