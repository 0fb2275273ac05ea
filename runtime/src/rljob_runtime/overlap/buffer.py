"""Scored prompt groups, oldest first, until the trainer takes them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rljob_runtime.errors import DeadlineError
from rljob_runtime.overlap.staleness import GroupVersions, StalenessGate, enough
from rljob_runtime.records import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All scored samples of one prompt."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    failed_samples: int
    """Samples left out because their reward failed."""

    recovered: bool = False
    """Whether an earlier attempt had finished it."""

    oldest_version: int = field(init=False)
    """Weights version of the oldest token; found once, for every change of the buffer asks for it."""

    def __post_init__(self) -> None:
        """Find the oldest version."""
        object.__setattr__(self, "oldest_version", min(self._versions()))

    @property
    def newest_version(self) -> int:
        """Weights version of the newest token."""
        return max(self._versions())

    def _versions(self) -> Iterator[int]:
        return (span.version for t in self.trajectories for segment in t.segments for span in segment.version_spans)


class TrajectoryBuffer:
    """Holds groups between scoring and training; every group is taken once or dropped once (ONCE)."""

    def __init__(
        self,
        *,
        gate: StalenessGate,
        unfinished: GroupVersions,
        on_drop: Callable[[Group], None],
        on_taken: Callable[[int, Sequence[Group]], None] = lambda version, groups: None,
    ) -> None:
        """Start empty.

        Args:
            gate: knows how old a token may be; notified of every batch taken.
            unfinished: groups that are still being made.
            on_drop: called for every group that is too stale, so that admission can refill it.
            on_taken: called with the version and the groups of every batch.
        """
        self._gate = gate
        self._unfinished = unfinished
        self._on_drop = on_drop
        self._on_taken = on_taken
        self._given: dict[int, tuple[Group, ...]] = {}
        """Batches that an earlier attempt took, by version."""
        self._groups: dict[int, Group] = {}
        self._versions = GroupVersions()
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """Groups ready to be taken."""
        return len(self._groups)

    def restore(self, batches: Mapping[int, tuple[Group, ...]], waiting: Sequence[Group]) -> None:
        """Go on with what an earlier attempt had: batches that it took, by version, and groups that waited."""
        self._given = dict(batches)
        for group in waiting:
            self.put(group)

    def put(self, group: Group) -> None:
        """Add a scored group."""
        self._groups[group.group_id] = group
        self._versions.add(group.group_id, group.oldest_version)
        self._changed.set()

    def changed(self) -> None:
        """The set of unfinished groups changed."""
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Wake every waiter with ``error``: no more groups will come."""
        self._failure = error
        self._changed.set()

    async def take(self, count: int, *, version: int, timeout_s: float, what: str) -> list[Group]:
        """The ``count`` oldest groups, to be trained from ``version``; none has a token that is too old (BOUND).

        Waits also for groups that would become too old if others were taken before them. The batch that an earlier attempt took for
        this version is taken again.

        Raises:
            DeadlineError: fewer than ``count`` groups after ``timeout_s``; names ``what`` was awaited.
        """
        if (given := self._given.pop(version, None)) is not None:
            self._gate.taken()
            return list(given)
        try:
            async with asyncio.timeout(timeout_s):
                while self._failure is None and not self._ready(count, version):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineError(f"only {len(self._groups)} of {count} groups were ready within {timeout_s:.0f} s: {what}") from error
        if self._failure is not None:
            raise self._failure
        oldest = sorted(self._groups.values(), key=lambda group: (group.oldest_version, group.group_id))[:count]
        self._gate.taken()
        self._on_taken(version, oldest)
        return [self._pop(group.group_id) for group in oldest]

    def _pop(self, group_id: int) -> Group:
        self._versions.discard(group_id)
        return self._groups.pop(group_id)

    def _ready(self, count: int, version: int) -> bool:
        """O(versions) per change of the buffer; O(groups) where some have become too stale."""
        gate = self._gate
        if any(gate.too_stale(started, version) for started in self._versions.counts):
            for group in [g for g in self._groups.values() if gate.too_stale(g.oldest_version, version)]:
                self._on_drop(self._pop(group.group_id))
        return len(self._groups) >= count and self.suffices(count, version, self._unfinished.counts)

    def suffices(self, count: int, version: int, making: Mapping[int, int]) -> bool:
        """Whether ``count`` groups can be taken of all that are not among ``making``, which are yet to be waited for.

        Args:
            count: groups of a batch; there are as many.
            version: that it is trained from.
            making: unfinished groups by the version under which they were started.
        """
        found = Counter(self._versions.counts) + Counter(self._unfinished.counts)
        found.subtract(making)
        gate = self._gate
        return enough(found, making, version=version, max_staleness=gate.max_staleness, count=count, spare=gate.spare)
