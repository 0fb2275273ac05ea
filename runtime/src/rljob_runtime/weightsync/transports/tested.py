"""What transports that may not work where a job runs have in common: a test at the start, and the object store in their place."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import TypeVar

from rljob_runtime.errors import DeadlineError, WeightSyncError
from rljob_runtime.weightsync.transport import PartnerLostError, SyncLink, Transport, TransportSettings
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport

ResultT = TypeVar("ResultT")

TEST_VERSION = -1
"""Of what every sender sends first."""
TEST_PART = 0
TEST_S = 60.0
"""Deadline of a test, or a quarter of a sync's: what stands in for it has to have time."""
MOST_FAILED_TESTS = 2
"""In a row, after which none is made any more: where a port is blocked, each one keeps an engine that joins waiting."""


class TestedTransport(ABC):
    """The driver's part; see :class:`~rljob_runtime.weightsync.transport.Transport`."""

    __test__ = False  # no test, whatever pytest reads in its name
    title: str
    """What warnings call it."""
    together = True
    """Whether engines receive together, so that both ends are made again for those that are left once one is lost."""

    def __init__(self, settings: TransportSettings) -> None:
        """Keep them."""
        self.warning: str | None = None
        self._settings = settings
        self._instead: Transport | None = None
        self._failed_tests = 0
        """In a row."""
        self._engines: tuple[int, ...] = ()
        """Both ends are made for."""

    async def prepare(self, link: SyncLink) -> None:
        """Make both ends and let the first bucket of every sender through; where that fails, prepare the object store."""
        if self._instead is not None and self._failed_tests >= MOST_FAILED_TESTS:
            await self._instead.prepare(link)
            return
        self.warning, self._instead = None, None
        try:
            await self._retried(link)
            self._engines, self._failed_tests = tuple(link.engines), 0
        except (WeightSyncError, DeadlineError) as error:
            self._failed_tests += 1
            self.warning = f"weights go through the object store, because {self.title} failed its test: {error}"
            self._instead = ObjectStoreTransport(self._settings)
            await self._instead.prepare(link)

    async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """Move all weights; again, among those that are left, where an engine was lost under way."""
        if self._instead is None and self.together and self._engines != tuple(link.engines):  # one was lost since
            await self.prepare(link)
        while self._instead is None:
            try:
                return await self._released(self._transfer(version, link))
            except PartnerLostError:
                await self.prepare(link)
        return await self._instead.transfer(version, link)

    async def _retried(self, link: SyncLink) -> None:
        while True:
            try:
                return await self._released(self._prepare(link))
            except PartnerLostError:
                continue

    async def _released(self, moving: Awaitable[ResultT]) -> ResultT:
        """What a coroutine returns; where it breaks off nobody waits any more."""
        try:
            return await moving
        except BaseException as error:
            await self._release(str(error) or type(error).__name__)
            raise

    def _test_s(self, link: SyncLink) -> float:
        """Deadline of the test."""
        return min(TEST_S, link.timeout_s / 4)

    @abstractmethod
    async def _prepare(self, link: SyncLink) -> None:
        """Make both ends and test them.

        Raises:
            WeightSyncError, DeadlineError: they do not work here.
            PartnerLostError: an engine was lost meanwhile.
        """

    @abstractmethod
    async def _transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """As ``Transport.transfer``.

        Raises:
            PartnerLostError: an engine was lost meanwhile.
        """

    async def _release(self, reason: str) -> None:
        """Have both ends give up what they wait for; nothing here."""
        del reason
        await asyncio.sleep(0)
