"""Lets calls of the reward workers pass while the models that they ask are on their devices; between these times calls wait.

::

    scheduler, validator ── score(batch) ──> waits ── pass_waiting, open ──> reward workers ──> results
                                                 close: returns when none of those that passed is under way
"""

from __future__ import annotations

import asyncio
import math

from rljob_runtime.overlap.scheduler import ScoreResponses
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult


class ScoringGate:
    """Closed at first. What passes has a deadline of its own; how long the gate stays closed is bounded by the phases of a step."""

    def __init__(self, score: ScoreResponses) -> None:
        """In front of ``score``."""
        self._score = score
        self._calls = 0
        """So far; a call's number is how many came before it."""
        self._passing: float = 0
        """Calls of lower numbers pass."""
        self._unfinished: set[int] = set()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return sum(number >= self._passing for number in self._unfinished)

    async def score(self, batch: RewardBatch) -> list[RewardResult]:
        """Score all responses once the gate is open; raises as what it stands in front of."""
        number = self._calls
        self._calls += 1
        self._unfinished.add(number)
        try:
            while number >= self._passing:
                await self._change()
            return await self._score(batch)
        finally:
            self._unfinished.discard(number)
            self._changed.set()

    async def pass_waiting(self) -> None:
        """Let those pass that wait now; returns when they have ended. What comes later waits."""
        self._passing = self._calls
        await self._ended()

    def open(self) -> None:
        """Let everything pass."""
        self._passing = math.inf
        self._changed.set()

    def shut(self) -> None:
        """Let nothing more pass."""
        self._passing = self._calls if math.isinf(self._passing) else self._passing

    async def close(self) -> None:
        """Let nothing more pass; returns when what did has ended."""
        self.shut()
        await self._ended()

    async def _ended(self) -> None:
        self._changed.set()
        while any(number < self._passing for number in self._unfinished):
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
