"""Response lengths with one mean and three tails."""

from __future__ import annotations

from functools import partial

import numpy as np

from rljob_runtime.records import IntArray
from rljob_runtime.simulation import lengths
from rljob_runtime.simulation.lengths import Lengths, Quantile, log_normal_quantile

MEAN_TOKENS = 256
MAX_TOKENS = 8 * MEAN_TOKENS
"""As maxResponseTokens would cut them off."""
LOG_NORMAL_SIGMA = 0.8
PARETO_SHAPE = 1.2
"""Below 2 the variance is infinite before the cut: the cut is reached all the time."""


def make(name: str, *, prompts: int, samples: int, seed: int) -> Lengths:
    """A table of lengths with mean :data:`MEAN_TOKENS` and at most :data:`MAX_TOKENS`.

    Raises:
        KeyError: no such distribution.
    """
    text, quantile = DISTRIBUTIONS[name]
    return lengths.make(quantile, name=name, text=text, mean=MEAN_TOKENS, longest=MAX_TOKENS, prompts=prompts, samples=samples, seed=seed)


def _constant(uniform: np.ndarray) -> np.ndarray:
    return np.ones_like(uniform)


def _pareto(uniform: np.ndarray, shape: float) -> np.ndarray:
    return uniform ** (-1.0 / shape)


DISTRIBUTIONS: dict[str, tuple[str, Quantile]] = {
    "constant": (f"every response has {MEAN_TOKENS} tokens", _constant),
    "log-normal": (f"log-normal, sigma {LOG_NORMAL_SIGMA}, cut at {MAX_TOKENS}", partial(log_normal_quantile, sigma=LOG_NORMAL_SIGMA)),
    "heavy tail": (f"Pareto, shape {PARETO_SHAPE}, cut at {MAX_TOKENS}", partial(_pareto, shape=PARETO_SHAPE)),
}


def spread(table: IntArray) -> float:
    """Coefficient of variation."""
    return float(table.std() / table.mean())
