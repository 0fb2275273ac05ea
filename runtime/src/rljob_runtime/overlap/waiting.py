"""Samples without an engine, in the order in which they will be given one."""

from __future__ import annotations

import heapq
import itertools

from rljob_runtime.overlap.samples import Owner, Sample


class WaitingLine:
    """Owners by priority; of one owner the longest first (it holds up its group and is the costliest to lose), then the oldest group.

    O(log n) per sample; one that is withdrawn leaves its entry behind, which is skipped.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._lines: dict[Owner, list[tuple[int, int, int, int, Sample]]] = {}
        self._entries: dict[Sample, int] = {}
        """Samples that wait, by the number of their entry."""
        self._numbers = itertools.count()
        self._only: Owner | None = None

    def __len__(self) -> int:
        """Samples that wait, whether or not they may be taken."""
        return len(self._entries)

    def __contains__(self, sample: Sample) -> bool:
        """Whether it waits here."""
        return sample in self._entries

    @property
    def only(self) -> Owner | None:
        """Whose samples alone may be taken; None: anyone's."""
        return self._only

    def reserve(self, owner: Owner | None) -> None:
        """Let only samples of ``owner`` be taken; None ends that."""
        self._only = owner

    @property
    def ready(self) -> int:
        """Samples that may be taken; O(samples that wait) under a reservation."""
        return len(self._entries) if self._only is None else sum(sample.owner is self._only for sample in self._entries)

    def push(self, sample: Sample) -> None:
        """Add a sample."""
        number = next(self._numbers)
        self._entries[sample] = number
        line = self._lines.setdefault(sample.owner, [])
        heapq.heappush(line, (-len(sample.token_ids), sample.group_id, sample.index, number, sample))

    def withdraw(self, sample: Sample) -> None:
        """Remove a sample that waits."""
        del self._entries[sample]

    def pop(self, count: int) -> list[Sample]:
        """Take the first ``count`` that may be taken, or as many as there are."""
        taken: list[Sample] = []
        for owner in sorted(self._lines, key=lambda owner: owner.priority):
            if self._only is not None and owner is not self._only:
                continue
            line = self._lines[owner]
            while line and len(taken) < count:
                *_, number, sample = heapq.heappop(line)
                if self._entries.get(sample) == number:
                    del self._entries[sample]
                    taken.append(sample)
            if not line:
                del self._lines[owner]
        return taken
