"""Differences of two sides, and the numbers by which a side's result is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.fidelity.cases import Case
from bench.fidelity.exchange import RESULTS, Array, Result

TOLERANCE = 1e-5
"""Of losses, gradients and advantages in float32: absolute up to 1, relative above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest one of some results."""

    value: float
    """|ours - theirs| / max(1, |theirs|)."""
    result: str
    ours: float
    theirs: float


def difference(case: Case, ours: Result, theirs: Result) -> Difference:
    """The largest difference among the results that both have.

    Raises:
        ValueError: there is none to compare, or its shapes differ.
    """
    names = [name for name in RESULTS if name in ours and name in theirs and (case.only is None or name in case.only)]
    if not names:
        raise ValueError(f"{case.name}: ours has {sorted(ours)}, theirs {sorted(theirs)}, compared {case.only}; no result in common")
    return max((_largest(name, ours[name], theirs[name]) for name in names), key=lambda found: found.value)


def _largest(name: str, ours: Array, theirs: Array) -> Difference:
    if ours.shape != theirs.shape:
        raise ValueError(f"{name}: ours has the shape {ours.shape}, theirs {theirs.shape}")
    mine, other = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    with np.errstate(invalid="ignore"):
        apart = np.abs(mine - other) / np.maximum(1.0, np.abs(other))
    apart = np.where(np.isnan(apart), np.inf, apart)  # NaN, or infinities of both
    place = int(apart.argmax())
    return Difference(value=float(apart[place]), result=name, ours=float(mine[place]), theirs=float(other[place]))


def digest(result: Mapping[str, Array], names: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Four numbers for each result: two sums with fixed random weights, the sum of magnitudes, the largest magnitude."""
    kept = {}
    for name, array in result.items():
        if names is None or name in names:
            values = array.astype(np.float64).ravel()
            weights = np.random.default_rng(values.size).uniform(-1.0, 1.0, (2, values.size))
            kept[name] = [float(f"{x:.9g}") for x in (*(weights @ values), np.abs(values).sum(), np.abs(values).max())]
    return kept


def digests_apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest difference of two digests, in units of the larger of 1 and the sum of magnitudes."""
    return float(np.abs(np.subtract(ours, theirs)).max() / max(1.0, theirs[2]))
