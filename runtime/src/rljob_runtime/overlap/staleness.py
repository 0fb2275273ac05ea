"""How many prompt groups may be admitted: the bound on staleness, kept at submission.

Formula (AReaL, arXiv 2505.24298, ``staleness_manager``, where the ratio is called eta): with B groups per step, an asynchronous
generation ratio r and current version v, a group may be admitted while ``accepted + running < (r + v + 1) * B``. Trained oldest first, no
group is then trained more than r versions after it was started. r = 0 is synchronous training.

How old a trained token may be is a bound of its own. At least ceil(r), nothing has to be dropped for it; above, stragglers have more time;
below, and with spare groups, what gets too old is dropped as a group and its place given to another prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate


class StalenessGate:
    """Counts groups in and out; O(1) per call."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        async_generation_ratio: float,
        max_staleness: int,
        total_groups: int,
        version: int = 0,
        spare: int = 0,
    ) -> None:
        """Start at ``version``, as if exactly the groups of all earlier steps had been accepted.

        Args:
            groups_per_step: B, at least 1.
            async_generation_ratio: batches that generation may be ahead; fractions allow a part of one.
            total_groups: groups the whole run trains; never more are admitted.
            version: weights version at the start; not 0 after a resume.
            max_staleness: how many versions older than the trainer's a trained token may be.
            spare: groups beyond the allowance that may be in the making, so that a step can leave that many stragglers behind.
        """
        self._groups_per_step = groups_per_step
        self._async_generation_ratio = async_generation_ratio
        self._total_groups = total_groups
        self._version = version
        self._max_staleness = max_staleness
        self._spare = spare
        self._outstanding = version * groups_per_step
        self._next_batch = version
        """The version whose batch is not made up yet."""

    @property
    def version(self) -> int:
        """Current weights version."""
        return self._version

    @property
    def max_staleness(self) -> int:
        """How many versions older than the trainer's a trained token may be."""
        return self._max_staleness

    @property
    def spare(self) -> int:
        """Groups beyond the allowance."""
        return self._spare

    @property
    def capacity(self) -> int:
        """Groups that may be admitted now."""
        if self.too_stale(self._version, self._next_batch):
            return 0  # whatever begins now would be too old for the next batch
        allowed = math.floor((self._async_generation_ratio + self._version + 1) * self._groups_per_step) + self._spare
        return max(min(allowed, self._total_groups) - self._outstanding, 0)

    def too_stale(self, started: int, version: int) -> bool:
        """Whether a group started under version ``started`` is too old to be trained from ``version``."""
        return started < version - self._max_staleness

    def admit(self, groups: int) -> None:
        """Count admitted groups.

        Raises:
            ValueError: more than :attr:`capacity`; admission has a bug.
        """
        if groups > self.capacity:
            raise ValueError(f"{groups} groups admitted, only {self.capacity} allowed at version {self._version}")
        self._outstanding += groups

    def restore(self, groups: int, *, next_batch: int) -> None:
        """Count groups that an earlier attempt had admitted, however many; those of the batches before ``next_batch`` are given."""
        self._outstanding += groups
        self._next_batch = next_batch

    def taken(self) -> None:
        """The trainer has the batch of this version."""
        self._next_batch = max(self._next_batch, self._version + 1)

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
        self._next_batch = max(self._next_batch, version)


class GroupVersions:
    """Weights version under which each of some groups was started, and how many there are of each; O(1) per change."""

    def __init__(self) -> None:
        """Start empty."""
        self._version: dict[int, int] = {}
        self._counts: Counter[int] = Counter()

    @property
    def counts(self) -> Mapping[int, int]:
        """Groups by version; only versions that some group has."""
        return self._counts

    def add(self, group_id: int, version: int) -> None:
        """Note the version of a group; a group that has one keeps it."""
        if group_id not in self._version:
            self._version[group_id] = version
            self._counts[version] += 1

    def get(self, group_id: int) -> int | None:
        """Version of a group, None where none is noted."""
        return self._version.get(group_id)

    def discard(self, group_id: int) -> None:
        """Forget a group, if it is known."""
        version = self._version.pop(group_id, None)
        if version is not None:
            self._counts[version] -= 1
            if not self._counts[version]:
                del self._counts[version]


def enough(
    ready: Mapping[int, int], unfinished: Mapping[int, int], *, version: int, max_staleness: int, count: int, spare: int = 0
) -> bool:
    """Whether the oldest ``count`` of the ready groups can be trained now without making others too old that a wait would save.

    A group started under version s is trained in the steps up to s + max_staleness. Groups started up to s that this step leaves must fit
    into the ``(s + max_staleness - version) * count`` places of the steps until then (earliest deadline first, feasible if no deadline is
    overbooked). Without this wait, young groups that end early overtake long old responses, which then are lost: a bias against
    length. Where a bound of at least the gate's lag keeps it feasible, nothing is lost; where it is not, a wait that saves nothing is
    not made: this step's places are filled with groups of that deadline, whichever.

    Args:
        ready: finished groups by the version under which they were started, none too old for this step.
        unfinished: the same of groups that are being made.
        version: the trainer's weights.
        max_staleness: how many versions older a group may be.
        count: groups of one step; there are as many ready.
        spare: how many groups were admitted so that they may be lost.

    Returns:
        False while some unfinished group has to be waited for. O(versions in flight + max_staleness).
    """
    late = [0] * (max_staleness + 1)
    """Unfinished groups by the number of versions they still have: 0, this step is their last."""
    for started, groups in unfinished.items():
        if 0 <= (left := started + max_staleness - version) <= max_staleness:  # what is too old already is lost whether waited for or not
            late[left] += groups
    if not any(late):
        return True
    finished = [0] * (max_staleness + 1)
    for started, groups in ready.items():
        finished[min(max(started + max_staleness - version, 0), max_staleness)] += groups
    pairs = zip(accumulate(late), accumulate(finished), strict=True)
    return all(done >= count or open_ <= left * count + spare for left, (open_, done) in enumerate(pairs))
