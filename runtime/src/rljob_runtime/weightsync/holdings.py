"""What processes of an engine hold for its end of a transport, and free when another end takes its place."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_runtime.weightsync import shared_memory
from rljob_runtime.weightsync.copies import COPIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The same for all processes of an engine: a worker of a parallel model holds its own part of it."""

    copies: str | None = None
    """Name of copies of buckets, see ``copies``."""
    segments: str | None = None
    """Prefix of the names of shared memory that is read, see ``shared_memory``."""
    groups: frozenset[str] = frozenset()
    """Names of meetings that were joined, see ``group``: one of NCCL has buffers on the device."""

    def free(self) -> None:
        """Free what this process holds of it; page-locked mappings are those of ``staging``."""
        if self.copies is not None:
            COPIES.forget(self.copies)
        if self.segments is not None:
            shared_memory.forget(self.segments)
        if self.groups:
            from rljob_runtime.weightsync.group import MEMBERSHIPS  # torch, which the driver does without

            MEMBERSHIPS.leave(self.groups)
