"""Samples without an engine, in the order in which they will be given one."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container

from rljob_runtime.overlap.samples import Owner, Sample

_Entry = tuple[int, int, int, int, Sample]
"""What a line is ordered by, the number of the entry, the sample."""


class WaitingLine:
    """Owners by priority; of one owner the longest first (it holds up its group and is the costliest to lose), then the oldest group.

    Those whose beginning an engine has cached are in a line of that engine, so that they can wait for it while others pass by.
    O(log samples + engines) per sample; one that is withdrawn leaves its entry behind, which is skipped.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._lines: dict[Owner, dict[int | None, list[_Entry]]] = {}
        """Heaps, by preferred engine."""
        self._entries: dict[Sample, tuple[int, int | None]] = {}
        """Samples that wait: the number of their entry, and their preferred engine."""
        self._num_preferring: Counter[int | None] = Counter()
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

    def num_preferring(self, engine: int) -> int:
        """Samples that prefer this engine."""
        return self._num_preferring[engine]

    def push(self, sample: Sample, preferred: int | None = None) -> None:
        """Add a sample."""
        number = next(self._numbers)
        self._entries[sample] = (number, preferred)
        self._num_preferring[preferred] += 1
        line = self._lines.setdefault(sample.owner, {}).setdefault(preferred, [])
        heapq.heappush(line, (-sample.sampled_before - sample.num_sampled, sample.group_id, sample.index, number, sample))

    def withdraw(self, sample: Sample) -> None:
        """Remove a sample that waits."""
        _, preferred = self._entries.pop(sample)
        self._num_preferring[preferred] -= 1

    def first(self, passed_by: Container[int | None] = ()) -> Sample | None:
        """The first one that may be taken, but for those that prefer these engines; it stays here until it is withdrawn."""
        for owner in sorted(self._lines, key=lambda owner: owner.priority):
            if self._only is not None and owner is not self._only:
                continue
            lines = self._lines[owner]
            for preferred in [preferred for preferred, line in lines.items() if self._is_empty(line)]:
                del lines[preferred]
            if not lines:
                del self._lines[owner]
            open_ones = [line[0] for preferred, line in lines.items() if preferred not in passed_by]
            if open_ones:
                return min(open_ones)[-1]
        return None

    def forget_preferred(self, engine: int) -> None:
        """An engine has nothing cached any more: samples that prefer it prefer none then. O(these)."""
        for sample in [sample for lines in self._lines.values() for *_, sample in lines.pop(engine, [])]:
            if self._entries.get(sample, (0, None))[1] == engine:
                self.withdraw(sample)
                self.push(sample)

    def _is_empty(self, line: list[_Entry]) -> bool:
        """Whether nothing waits in it, once withdrawn ones are removed from its head."""
        while line and self._entries.get(line[0][-1], (-1, None))[0] != line[0][-2]:
            heapq.heappop(line)
        return not line
