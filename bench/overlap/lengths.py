"""Response lengths with one mean and three tails; a function of (prompt, sample), so that every schedule sees the same work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np

from rljob_runtime.records import IntArray

MEAN_TOKENS = 256
MAX_TOKENS = 8 * MEAN_TOKENS
"""As maxResponseTokens would cut them off."""
LOG_NORMAL_SIGMA = 0.8
PARETO_SHAPE = 1.2
"""Below 2 the variance is infinite before the cut: the cut is reached all the time."""

Quantile = Callable[[np.ndarray], np.ndarray]
"""Uniform numbers in (0, 1) to lengths in tokens, for a scale of 1."""


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


def make(name: str, *, prompts: int, samples: int, seed: int) -> Lengths:
    """A table of lengths with mean :data:`MEAN_TOKENS` and at most :data:`MAX_TOKENS`.

    Raises:
        KeyError: no such distribution.
    """
    text, quantile = DISTRIBUTIONS[name]
    uniform = np.random.default_rng(seed).uniform(1e-12, 1.0, size=(prompts, samples))
    tokens = _scaled_to_mean(quantile(uniform))
    return Lengths(name=name, text=text, table=np.maximum(np.rint(tokens), 1).astype(np.int32))


def _scaled_to_mean(raw: np.ndarray) -> np.ndarray:
    """``min(c * raw, MAX_TOKENS)`` with the c that gives the mean: bisection, since the cut moves mass."""
    low, high = 0.0, MAX_TOKENS / float(raw.min())
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * raw, MAX_TOKENS).mean() < MEAN_TOKENS else (low, middle)
    return np.minimum(high * raw, MAX_TOKENS)


def _constant(uniform: np.ndarray) -> np.ndarray:
    return np.ones_like(uniform)


def _pareto(uniform: np.ndarray, shape: float) -> np.ndarray:
    return uniform ** (-1.0 / shape)


def _log_normal(uniform: np.ndarray, sigma: float) -> np.ndarray:
    normal = NormalDist()
    drawn = [normal.inv_cdf(min(u, 1.0 - 1e-12)) for u in uniform.ravel().tolist()]
    return np.exp(sigma * np.asarray(drawn)).reshape(uniform.shape)


DISTRIBUTIONS: dict[str, tuple[str, Quantile]] = {
    "constant": (f"every response has {MEAN_TOKENS} tokens", _constant),
    "log-normal": (f"log-normal, sigma {LOG_NORMAL_SIGMA}, cut at {MAX_TOKENS}", partial(_log_normal, sigma=LOG_NORMAL_SIGMA)),
    "heavy tail": (f"Pareto, shape {PARETO_SHAPE}, cut at {MAX_TOKENS}", partial(_pareto, shape=PARETO_SHAPE)),
}


def spread(table: IntArray) -> float:
    """Coefficient of variation."""
    return float(table.std() / table.mean())
