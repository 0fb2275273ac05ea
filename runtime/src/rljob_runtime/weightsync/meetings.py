"""The driver's hold on the groups that weights travel in: it ends them, and says who keeps a chain waiting.

Callers have waited long enough, so a store that does not answer is not waited for: its sender is the one that is late.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from rljob_runtime.errors import SyncBrokenError
from rljob_runtime.weightsync.group import OVER, Meeting, as_sync_errors, connection

WATCHED_S = 0.3
"""How long the driver watches who waits: members look several times meanwhile."""
NOTES_TIMEOUT_S = 3.0
"""Of a question to a store, and of leaving the reason there."""


class Meetings:
    """The driver's hold on the groups of a transport."""

    def __init__(self, meetings: tuple[Meeting, ...]) -> None:
        """Connect to their stores; blocks.

        Raises:
            WeightSyncError: one does not answer.
        """
        self._meetings = meetings
        self._stores = [connection(meeting) for meeting in meetings]

    def waited_for(self) -> str:
        """Which members of chains others wait for now, and what they are to do; empty where nobody waits. Blocks shortly.

        A sender that does not answer is one of them.
        """
        try:
            before = [self._notes(index) for index in range(len(self._stores))]
            time.sleep(WATCHED_S)
            return self._blamed(before)
        except SyncBrokenError as error:
            return f"a sender of weights ({error})"

    def _blamed(self, before: Sequence[Mapping[int, str]]) -> str:
        """Of members that made another note meanwhile: they are alive, and wait."""
        found = []
        for index, old in enumerate(before):
            waiting = {rank: note for rank, note in self._notes(index).items() if old.get(rank) != note}
            found += [f"{self._meetings[index].chain[rank]} to {what}" for rank, what in blamed(waiting)]
        return ", ".join(found)

    def _notes(self, index: int) -> dict[int, str]:
        """What members of a chain waited for when they looked last, by rank."""
        store, ranks = self._stores[index], range(len(self._meetings[index].chain))
        with as_sync_errors(f"the store of trainer rank {self._meetings[index].sender} does not answer"):
            noted = [rank for rank in ranks if store.check([f"waits/{rank}"], NOTES_TIMEOUT_S)]
            return {rank: store.get(f"waits/{rank}", NOTES_TIMEOUT_S) for rank in noted}

    def end(self, reason: str) -> None:
        """Have every member that waits give up; blocks shortly."""
        for store in self._stores:
            with contextlib.suppress(RuntimeError):  # its sender is gone, or stopped; members see that
                store.set(OVER, reason, NOTES_TIMEOUT_S)
            store.close()
        self._stores = []


def blamed(waiting: Mapping[int, str]) -> list[tuple[int, str]]:
    """Ranks that keep a chain waiting, and what they are to do.

    Args:
        waiting: rank -> note of a member that is alive and waits.
    """
    notes = {rank: note.split(" ", 2) for rank, note in waiting.items()}
    wanted = {rank: (int(found[1]), found[2]) for rank, found in notes.items()}
    still = {rank: what for rank, what in wanted.values() if rank not in wanted}
    # All of them wait where the link between two is slow: these two wait for each other.
    mutual = {rank: what for by, (rank, what) in wanted.items() if rank in wanted and wanted[rank][0] == by}
    return sorted((still or mutual).items())
