"""What becomes of groups, for whoever keeps it: the seam between the scheduler and the journal of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rljob_runtime.overlap.buffer import Group


class Ending(StrEnum):
    """How a group ended that is not trained; its prompt is done."""

    DROPPED = "dropped"
    """Too few rewards, or too old in the buffer."""
    FILTERED = "filtered"
    """Nothing to learn from."""
    CANCELLED = "cancelled"
    """Too old while it was being generated."""


class GroupLog(Protocol):
    """Called in the order in which things happen; must neither wait nor raise."""

    def finished(self, group: Group) -> None:
        """A scored group waits for the trainer from now on."""

    def taken(self, version: int, groups: Sequence[Group]) -> None:
        """The trainer has taken its batch for ``version``."""

    def released(self, group_id: int, ending: Ending) -> None:
        """A group will not be trained."""


class NoGroupLog:
    """Keeps nothing."""

    def finished(self, group: Group) -> None:
        """Nothing."""

    def taken(self, version: int, groups: Sequence[Group]) -> None:
        """Nothing."""

    def released(self, group_id: int, ending: Ending) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What an earlier attempt had finished beyond the checkpoint that this one goes on from."""

    batches: Mapping[int, tuple[Group, ...]] = field(default_factory=dict)
    """Batches that it took, by version, without a gap from the checkpoint's on: trained again from the same groups."""
    waiting: tuple[Group, ...] = ()
    """Groups that no batch has."""
    released: Mapping[int, Ending | None] = field(default_factory=dict)
    """Groups that are not trained, by id; None where the metrics that are kept count it already."""

    @property
    def groups(self) -> list[Group]:
        """Those of batches, then the waiting ones."""
        return [group for version in sorted(self.batches) for group in self.batches[version]] + list(self.waiting)
