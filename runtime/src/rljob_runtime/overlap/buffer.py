"""Judged groups waiting to be trained: oldest first, too stale ones dropped and counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rljob_runtime.errors import DeadlineError
from rljob_runtime.records import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All judged samples of one prompt that can be trained."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    """At least one; samples whose reward failed are left out."""
    failed_samples: int
    """Samples left out because their reward failed."""

    @property
    def oldest_version(self) -> int:
        """Weights version of the oldest token."""
        return min(span.version for t in self.trajectories for span in t.completion.version_spans)


class TrajectoryBuffer:
    """Holds groups between judging and training; every group is taken once or dropped once (ONCE)."""

    def __init__(self, on_drop: Callable[[Group], None]) -> None:
        """``on_drop`` is told of every group that became too stale, so that admission can refill it."""
        self._groups: dict[int, Group] = {}
        self._arrived = asyncio.Condition()
        self._on_drop = on_drop
        self._failure: BaseException | None = None

    def __len__(self) -> int:
        """Groups ready to be taken."""
        return len(self._groups)

    async def put(self, group: Group) -> None:
        """Add a judged group."""
        async with self._arrived:
            self._groups[group.group_id] = group
            self._arrived.notify_all()

    async def fail(self, error: BaseException) -> None:
        """Wake every waiter with ``error``: no more groups will come."""
        async with self._arrived:
            self._failure = error
            self._arrived.notify_all()

    async def take(self, count: int, *, min_version: int, timeout_s: float, what: str) -> list[Group]:
        """The ``count`` oldest groups, none with a token older than ``min_version``.

        Raises:
            DeadlineError: fewer than ``count`` groups after ``timeout_s``; names ``what`` was awaited.
        """
        try:
            async with asyncio.timeout(timeout_s), self._arrived:
                await self._arrived.wait_for(lambda: self._ready(count, min_version))
        except TimeoutError as error:
            raise DeadlineError(f"only {len(self._groups)} of {count} groups were ready within {timeout_s:.0f} s: {what}") from error
        if self._failure is not None:
            raise self._failure
        return [self._groups.pop(group_id) for group_id in sorted(self._groups)[:count]]

    def _ready(self, count: int, min_version: int) -> bool:
        for group in [g for g in self._groups.values() if g.oldest_version < min_version]:
            self._on_drop(self._groups.pop(group.group_id))
        return self._failure is not None or len(self._groups) >= count
