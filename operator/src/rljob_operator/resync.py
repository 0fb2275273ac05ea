"""Full lists: once the watches have begun, at once after a gap in a watch, and every few minutes in any case.

A watch that was disconnected for longer than the API server keeps history (410 Gone) goes on from a new version; what changed in between,
and what was deleted, only a comparison with a full list shows. Changes found before the watch delivered them are counted, and a watch that
lags for too long fails the liveness probe.

Gaps that follow each other are compared after growing pauses with jitter, so that watches that keep breaking cost few lists.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Final

from rljob_api.naming import JOB_LABEL
from rljob_operator.cache import Cache, ObjectKey, Source
from rljob_operator.errors import KubeError, NotFoundError, RejectedError, SettingsError, UnavailableError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key
from rljob_operator.protocol import WATCHED, Kind, KubeClient

PERIOD_S: Final = 300.0
"""Seconds between two full lists."""
FIRST_DEADLINE_S: Final = 120.0
"""Timeout of the initial lists, including the wait for the API server and the CRDs."""
RETRY_S: Final = 2.0
FORBIDDEN: Final = 403
FIRST_PAUSE_S: Final = 1.0
"""Pause after the comparison that follows a gap."""
MAX_PAUSE_S: Final = 32.0
"""Longest pause, reached by doubling while gaps go on."""

logger = logging.getLogger(__name__)


class Resync:
    """Compares the cache with full lists."""

    def __init__(
        self, client: KubeClient, cache: Cache, add: Callable[[Key], None], *, namespaces: tuple[str, ...], metrics: Metrics
    ) -> None:
        """``add`` is called for every job to reconcile; empty ``namespaces``: all."""
        self._client = client
        self._cache = cache
        self._add = add
        self.namespaces = namespaces
        """Those that are watched; :meth:`wait_until_served` removes what may not be read."""
        self._left_out: tuple[str, ...] = ()
        self._metrics = metrics
        self._gaps: set[Kind] = set()
        self._has_gap = asyncio.Event()

    def note_gap(self, kind: Kind) -> None:
        """A watch of this kind began again from a list: deletions may be missing."""
        self._gaps.add(kind)
        self._has_gap.set()

    async def wait_until_served(self) -> None:
        """Wait until each kind can be listed. Of several namespaces, those that may not be read are left out: one that was deleted is such.

        Raises:
            SettingsError: a kind is not installed or may not be listed, or the API server did not answer within 120 s.
        """
        refused: set[str] = set()

        async def first_page(kind: Kind) -> int:
            if kind is WATCHED[0]:
                refused.clear()  # of an earlier try
            found, unreadable = await self._in_each_namespace(partial(self._first_page, kind))
            refused.update(unreadable)
            return found

        await self._for_each_kind(first_page)
        readable = tuple(name for name in self.namespaces if name not in refused)
        if refused and not readable:
            raise SettingsError(f"none of the namespaces {', '.join(self.namespaces)} can be read; {_REMEDY}")
        if refused:
            remedy = f"{_REMEDY}, or remove them from watch.namespaces"
            logger.error("namespaces that cannot be read are left out: %s; %s", ", ".join(sorted(refused)), remedy)
        self.namespaces, self._left_out = readable, tuple(sorted(refused))

    async def first(self) -> None:
        """List everything; retries while the API server or a CRD is missing.

        Raises:
            SettingsError: a kind is not installed or may not be listed, or the API server did not answer within 120 s.
        """
        await self._for_each_kind(lambda kind: self._list(kind, Source.LIST))

    async def _for_each_kind(self, work: Callable[[Kind], Awaitable[object]]) -> None:
        deadline = asyncio.get_running_loop().time() + FIRST_DEADLINE_S
        while True:
            try:
                for kind in WATCHED:
                    await work(kind)
            except KubeError as error:
                if not isinstance(error, NotFoundError | UnavailableError) or asyncio.get_running_loop().time() > deadline:
                    raise SettingsError(f"cannot list the watched kinds: {error}; {_REMEDY}") from error
                logger.warning("waiting for the watched kinds: %s; %s", error, _REMEDY)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def run(self) -> None:
        """Compare a kind after a gap in its watch, and all kinds every five minutes, until cancelled.

        Raises:
            SettingsError: a namespace that was left out can be read; watches begin with the process.
        """
        clock_s = asyncio.get_running_loop().time
        full_s, pause_s, quiet_s = clock_s() + PERIOD_S, FIRST_PAUSE_S, 0.0
        while True:
            try:
                async with asyncio.timeout_at(full_s):
                    await self._has_gap.wait()
            except TimeoutError:
                await self.compare(WATCHED, Source.OTHER)
                await self._look_at_left_out()
                full_s = clock_s() + PERIOD_S
                continue
            if clock_s() > quiet_s:
                pause_s = FIRST_PAUSE_S
            self._has_gap.clear()
            gaps, self._gaps = self._gaps, set()
            logger.info("watches began again from a list: %s; comparing with full lists", ", ".join(sorted(gaps)))
            for kind in await self.compare(sorted(gaps), Source.LIST):
                self.note_gap(kind)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            quiet_s = clock_s() + 2 * pause_s

    async def compare(self, kinds: Iterable[Kind], source: Source) -> list[Kind]:
        """Compare once; ``source`` says whether watches have yet to deliver what is found. Returns the kinds that could not be listed."""
        failed = []
        for kind in kinds:
            try:
                missed = await self._list(kind, source)
            except KubeError as error:
                logger.warning("resync skipped: %s", error)
                failed.append(kind)
                continue
            if missed:
                self._metrics.missed_objects.labels(kind).inc(missed)
                logger.info("resync found %d changed %ss before the watch delivered them", missed, kind)
        return failed

    async def _list(self, kind: Kind, source: Source) -> int:
        """List one kind. Returns the number of objects that had changed."""
        return (await self._in_each_namespace(partial(self._list_one, kind, source)))[0]

    async def _look_at_left_out(self) -> None:
        for namespace in self._left_out:
            try:
                for kind in WATCHED:
                    await self._first_page(kind, namespace)
            except KubeError:
                continue
            raise SettingsError(f"namespace {namespace} can be read now; the operator restarts to watch it")

    async def _in_each_namespace(self, work: Callable[[str | None], Awaitable[int]]) -> tuple[int, set[str]]:
        """The sum of ``work``, and which namespaces refused it; one that does keeps no other from being looked at.

        Raises:
            KubeError: of the last namespace, if all refuse; any other one at once.
        """
        total = 0
        refused: set[str] = set()
        for namespace in self.namespaces or (None,):
            try:
                total += await work(namespace)
            except RejectedError as error:
                if namespace is None or error.status != FORBIDDEN or len(refused) + 1 == len(self.namespaces):
                    raise
                refused.add(namespace)
                logger.warning("namespace %s cannot be read: %s", namespace, error)
        return total, refused

    async def _first_page(self, kind: Kind, namespace: str | None) -> int:
        async for _ in self._client.pages(kind, namespace, "" if kind is Kind.RLJOB else JOB_LABEL):
            break
        return 0

    async def _list_one(self, kind: Kind, source: Source, namespace: str | None) -> int:
        missed, version = 0, 0
        present: set[ObjectKey] = set()
        async for page in self._client.pages(kind, namespace, "" if kind is Kind.RLJOB else JOB_LABEL):
            version = int(page["metadata"]["resourceVersion"])
            for item in page["items"]:
                present.add((kind, item["metadata"]["namespace"], item["metadata"]["name"]))
                missed += self._enqueue(self._cache.put(kind, item, source))
            await asyncio.sleep(0)  # decoding a page blocks the event loop for a moment; let other tasks run
        swept = self._cache.sweep(kind, present, version, () if namespace is None else (namespace,))
        return missed + sum(self._enqueue(key) for key in swept)

    def _enqueue(self, key: Key | None) -> int:
        if key is None:
            return 0
        self._add(key)
        return 1


_REMEDY = (
    "install the CRDs of RLJob and KubeRay (rljobs.rljob.dev, rayjobs.ray.io, rayclusters.ray.io) and grant the operator's service account "
    "get, list and watch on them and on pods"
)
