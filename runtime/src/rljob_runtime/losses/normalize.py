"""Mean and spread of rewards and advantages: over groups, over everything so far, over the tokens of a step; numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

DoubleArray = npt.NDArray[np.float64]

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it; one that is not above this counts as 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Count, mean and sum of squared distances from the mean: all that merging needs (Welford 1962; Chan, Golub, LeVeque 1983)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Moments:
        """The moments of values of shape (N,)."""
        array = np.asarray(values, dtype=np.float64)
        if not array.size:
            return cls()
        mean = float(array.mean())
        return cls(count=array.size, mean=mean, m2=float(((array - mean) ** 2).sum()))

    def merged(self, other: Moments) -> Moments:
        """The moments of both sets of values together."""
        count = self.count + other.count
        if not count:
            return self
        delta = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + delta * other.count / count,
            m2=self.m2 + other.m2 + delta**2 * self.count * other.count / count,
        )

    @property
    def std(self) -> float:
        """Unbiased; 0 for fewer than two values."""
        return float(np.sqrt(self.m2 / (self.count - 1))) if self.count > 1 else 0.0


def moments_by(values: DoubleArray, keys: npt.ArrayLike) -> tuple[DoubleArray, DoubleArray]:
    """Mean and unbiased standard deviation of the values with the same key, for each value.

    Equal values give exactly themselves and 0, also where a rounded mean would not.

    Args:
        values: shape (N,).
        keys: shape (N,).

    Returns:
        Two arrays of shape (N,).
    """
    _, first, inverse, counts = np.unique(np.asarray(keys), return_index=True, return_inverse=True, return_counts=True)
    mean = np.bincount(inverse, values, counts.size) / counts
    differs = np.zeros(counts.size, dtype=np.bool_)
    differs[inverse[values != values[first][inverse]]] = True
    mean = np.where(differs, mean, values[first])
    variance = np.bincount(inverse, (values - mean[inverse]) ** 2, counts.size) / np.maximum(counts - 1, 1)
    return mean[inverse], np.sqrt(variance)[inverse]


def scaled(centered: DoubleArray, std: DoubleArray) -> DoubleArray:
    """``x / (std + 1e-6)``, and 0 where nothing varies (std <= 1e-6, so also groups of one): rounding would be blown up to a signal."""
    return np.where(std > EPSILON, centered / (std + EPSILON), 0.0)


def whitened(values: DoubleArray, counted: npt.NDArray[np.bool_]) -> DoubleArray:
    """Shift and scale so that the counted values have mean 0 and variance 1; shapes (N,).

    ``(x - mean) / sqrt(var + 1e-8)`` with the unbiased variance, as in TRL's and verl's ``masked_whiten``. Fewer than two counted values
    have no variance: then nothing changes.
    """
    if np.count_nonzero(counted) < 2:
        return values
    chosen = values[counted]
    return np.asarray((values - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8))
