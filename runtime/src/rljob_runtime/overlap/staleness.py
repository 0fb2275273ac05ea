"""How many prompt groups may be admitted: the bound on staleness, kept at submission.

Formula (AReaL, arXiv 2505.24298, ``staleness_manager``): with B groups per step, allowed lag eta and current version v, a
group may be admitted while ``accepted + running < (eta + v + 1) * B``. Trained oldest first, no group is then trained more
than eta versions after it was started. eta = 0 is synchronous training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate


class StalenessGate:
    """Counts groups in and out; O(1) per call."""

    def __init__(self, *, groups_per_step: int, max_lag: float, total_groups: int, version: int = 0) -> None:
        """Start at ``version``, as if exactly the groups of all earlier steps had been accepted.

        Args:
            groups_per_step: B, at least 1.
            max_lag: eta, in steps; fractions allow a part of a batch ahead.
            total_groups: groups the whole run trains; never more are admitted.
            version: weights version at the start; not 0 after a resume.
        """
        self._groups_per_step = groups_per_step
        self._max_lag = max_lag
        self._total_groups = total_groups
        self._version = version
        self._outstanding = version * groups_per_step

    @property
    def version(self) -> int:
        """Current weights version."""
        return self._version

    @property
    def max_lag(self) -> float:
        """eta."""
        return self._max_lag

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        allowed = math.floor((self._max_lag + self._version + 1) * self._groups_per_step)
        return max(min(allowed, self._total_groups) - self._outstanding, 0)

    def admit(self, groups: int) -> None:
        """Count admitted groups.

        Raises:
            ValueError: more than :attr:`capacity`; admission has a bug.
        """
        if groups > self.capacity:
            raise ValueError(f"{groups} groups admitted, only {self.capacity} allowed at version {self._version}")
        self._outstanding += groups

    def drop(self, groups: int = 1) -> None:
        """Groups that will not be trained make room for others."""
        self._outstanding -= groups

    def advance(self, version: int) -> None:
        """New weights are served.

        Raises:
            ValueError: the version did not grow.
        """
        if version <= self._version:
            raise ValueError(f"version must grow: {self._version} -> {version}")
        self._version = version


def enough(ready: Sequence[int], unfinished: Iterable[int], *, version: int, max_lag: int, count: int) -> bool:
    """Whether the oldest ``count`` of the ready groups can be trained now without making any other group too old.

    A group started under version s is trained in the steps up to s + max_lag. Groups started up to s that this step leaves must fit
    into the ``(s + max_lag - version) * count`` places of the steps until then (earliest deadline first, feasible if no deadline is
    overbooked). Without this wait, young groups that end early overtake long old responses, which then are lost: a bias against
    length. The gate's bound keeps it feasible.

    Args:
        ready: versions under which the finished groups were started.
        unfinished: the same of groups that are being made.
        version: the trainer's weights.
        max_lag: how many versions older a group may be.
        count: groups of one step; there are as many ready.

    Returns:
        False while some unfinished group has to be waited for. O(groups in flight + max_lag).
    """
    late = [0] * (max_lag + 1)
    """Unfinished groups by the number of versions they still have: 0, this step is their last."""
    for started in unfinished:
        if (left := started + max_lag - version) <= max_lag:
            late[max(left, 0)] += 1
    if not any(late):
        return True
    finished = [0] * (max_lag + 1)
    for started in ready:
        finished[min(max(started + max_lag - version, 0), max_lag)] += 1
    pairs = zip(accumulate(late), accumulate(finished), strict=True)
    return all(open_ + done - min(done, count) <= left * count for left, (open_, done) in enumerate(pairs))
