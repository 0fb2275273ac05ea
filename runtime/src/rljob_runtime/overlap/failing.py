"""Ends a run whose rewards fail on everything: its groups would be dropped and replaced without end."""

from __future__ import annotations

from collections.abc import Sequence

from rljob_runtime.errors import RewardsFailedError

MAX_DROPPED_IN_ROW = 100
"""Groups. Where one sample in ten has a score, a streak of so many groups of eight is less likely than one in a billion."""


class FailingRewards:
    """Counts groups that were dropped because too few of their samples have a score, since the last one that was not."""

    def __init__(self, limit: int = MAX_DROPPED_IN_ROW) -> None:
        """``limit``: how many in a row end the run."""
        self._limit = limit
        self._in_row = 0

    def count(self, is_scored: bool, errors: Sequence[str]) -> None:
        """A group has enough scores or not; ``errors`` are the newest of rewards.

        Raises:
            RewardsFailedError: it is one of too many in a row that have not.
        """
        self._in_row = 0 if is_scored else self._in_row + 1
        if self._in_row >= self._limit:
            last = errors[-1] if errors else "not known"
            raise RewardsFailedError(
                f"the samples of {self._in_row} groups of responses in a row got no score, the last error is: {last}; "
                "correct the reward or the data, or set rewards[].onError to a score"
            )
