"""Comparisons in pairs: RLJob and a peer run one after the other, several times, and each pair gives one ratio."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

PAIRS = 3
"""At least so many, for a range."""


def ratios(own_s: Sequence[float], other_s: Sequence[float]) -> list[float]:
    """The peer's seconds over RLJob's, pair by pair: above 1 is in favor of RLJob.

    Raises:
        ValueError: Numbers of runs differ.
    """
    return [other / own for own, other in zip(own_s, other_s, strict=True)]


def spread(found: Sequence[float]) -> str:
    """Median, range, and number of pairs."""
    if len(found) == 1:
        return f"{found[0]:.2f}, one pair"
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f}, {len(found)} pairs)"
