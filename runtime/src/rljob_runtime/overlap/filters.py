"""Dynamic sampling: which scored groups are worth training on. Pure decisions over scores.

A group whose responses all score the same has no advantage to learn from (DAPO, arXiv 2503.14476, dynamic sampling); one of extreme
mean is nearly so (mean filter as in ROLL, ``query_filter``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFilter:
    """Keeps a group if every bound that is set holds, all strict: ``min_mean < mean < max_mean`` and ``std > min_std``."""

    min_mean: float | None = None
    max_mean: float | None = None
    min_std: float | None = None
    """Standard deviation of the population; 0 drops groups whose responses all score the same."""

    def keeps(self, scores: Sequence[float]) -> bool:
        """Whether a group of these scores, at least one, is to be trained on."""
        mean = statistics.fmean(scores)
        if self.min_mean is not None and mean <= self.min_mean:
            return False
        if self.max_mean is not None and mean >= self.max_mean:
            return False
        # pstdev computes with exact fractions: equal scores give exactly 0
        return self.min_std is None or statistics.pstdev(scores) > self.min_std

    def __str__(self) -> str:
        """The condition for being kept."""
        bounds = [
            f"mean > {self.min_mean:g}" if self.min_mean is not None else "",
            f"mean < {self.max_mean:g}" if self.max_mean is not None else "",
            f"std > {self.min_std:g}" if self.min_std is not None else "",
        ]
        return " and ".join(bound for bound in bounds if bound) or "any"
