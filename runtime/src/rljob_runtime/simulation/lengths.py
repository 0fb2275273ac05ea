"""How long responses are: a function of (prompt, sample), so that every schedule sees the same work."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np

from rljob_runtime.records import IntArray

SIGMA = 0.8
"""Of the logarithm: responses of reasoning models are skewed, the longest of a batch is several times the mean."""

Quantile = Callable[[np.ndarray], np.ndarray]
"""Uniform numbers in (0, 1) to lengths, for a scale of 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """One distribution."""

    name: str
    text: str
    table: IntArray
    """Shape (prompts, samples), tokens."""

    def of(self, prompt: int, sample: int) -> int:
        """Tokens of one response; prompts repeat after the table's end."""
        return int(self.table[prompt % len(self.table), sample])

    def group_mean_max_tokens(self) -> float:
        """Mean over groups of the longest response."""
        return float(self.table.max(axis=1).mean())


def make(quantile: Quantile, *, name: str, text: str, mean: float, longest: int, prompts: int, samples: int, seed: int) -> Lengths:
    """A table of lengths of a shape, scaled to a mean and cut at the longest.

    Args:
        quantile: the shape.
        name: of it.
        text: for people.
        mean: tokens; at most ``longest``.
        longest: tokens, where responses are cut.
        prompts: rows of the table.
        samples: of one prompt.
        seed: the same one makes the same table.
    """
    uniform = np.random.default_rng(seed).uniform(1e-12, 1.0, size=(prompts, samples))
    tokens = _scaled_to_mean(quantile(uniform), mean, longest)
    return Lengths(name=name, text=text, table=np.maximum(np.rint(tokens), 1).astype(np.int32))


def log_normal(*, mean: float, longest: int, prompts: int, samples: int, seed: int, sigma: float = SIGMA) -> Lengths:
    """A log-normal distribution, cut at the longest."""
    text = f"log-normal, sigma {sigma:.2g}, mean {mean:,.0f}, cut at {longest:,}"
    shape = partial(log_normal_quantile, sigma=sigma)
    return make(shape, name="log-normal", text=text, mean=mean, longest=longest, prompts=prompts, samples=samples, seed=seed)


def log_normal_quantile(uniform: np.ndarray, sigma: float) -> np.ndarray:
    """Of a log-normal distribution with median 1."""
    normal = NormalDist()
    numbers = [normal.inv_cdf(min(u, 1.0 - 1e-12)) for u in uniform.ravel().tolist()]
    return np.exp(sigma * np.asarray(numbers)).reshape(uniform.shape)


def sigma_of(*, mean: float, longest: float, count: int) -> float:
    """The sigma of which the longest of ``count`` responses is expected to be so much longer than the mean; at most 2.

    ``longest / mean = exp(sigma z - sigma^2 / 2)`` with z the quantile 1 - 1 / count; the smaller of two solutions.
    """
    if longest <= mean or count < 2:
        return 0.0
    z, ratio = NormalDist().inv_cdf(1 - 1 / count), math.log(longest / mean)
    return min(z - math.sqrt(max(z * z - 2 * ratio, 0.0)), 2.0)


def _scaled_to_mean(raw: np.ndarray, mean: float, longest: int) -> np.ndarray:
    """``min(c * raw, longest)`` with the c that gives the mean: bisection, since the cut moves mass."""
    low, high = 0.0, longest / float(raw.min())
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * raw, longest).mean() < mean else (low, middle)
    return np.minimum(high * raw, longest)
