"""Full lists: once before the first decision, then every few minutes to find changes that a watch has missed.

A watch that was disconnected for longer than the API server keeps history restarts from a new list, which does not show what was
deleted in between; only a comparison with a full list does. Changes found before the watch delivered them are counted, and a watch that
lags for too long fails the liveness probe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from rljob_api.naming import JOB_LABEL
from rljob_operator.cache import Cache, ObjectKey, Source
from rljob_operator.errors import KubeError, NotFoundError, SettingsError, UnavailableError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key
from rljob_operator.protocol import WATCHED, Kind, KubeClient

PERIOD_S: Final = 300.0
"""Seconds between two full lists."""
FIRST_DEADLINE_S: Final = 120.0
"""Timeout of the initial lists, including the wait for the API server and the CRDs."""
RETRY_S: Final = 2.0

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
        self._namespaces = namespaces
        self._metrics = metrics

    async def first(self) -> None:
        """List everything; retries while the API server or a CRD is missing.

        Raises:
            SettingsError: a kind is not installed or may not be listed, or the API server did not answer within 120 s.
        """
        deadline = asyncio.get_running_loop().time() + FIRST_DEADLINE_S
        while True:
            try:
                for kind in WATCHED:
                    await self._list(kind)
            except KubeError as error:
                if not isinstance(error, NotFoundError | UnavailableError) or asyncio.get_running_loop().time() > deadline:
                    raise SettingsError(f"cannot list the watched kinds: {error}; {_REMEDY}") from error
                logger.warning("waiting for the watched kinds: %s; %s", error, _REMEDY)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def run(self) -> None:
        """Compare every five minutes until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.compare()

    async def compare(self) -> None:
        """Compare once. A failed list is only logged; the next one will do."""
        for kind in WATCHED:
            try:
                missed = await self._list(kind)
            except KubeError as error:
                logger.warning("resync skipped: %s", error)
                continue
            if missed:
                self._metrics.missed_objects.labels(kind).inc(missed)
                logger.info("resync found %d changed %ss before the watch delivered them", missed, kind)

    async def _list(self, kind: Kind) -> int:
        """List one kind. Returns the number of objects that had changed."""
        missed = 0
        for namespace in self._namespaces or (None,):
            present: set[ObjectKey] = set()
            version = 0
            async for page in self._client.pages(kind, namespace, "" if kind is Kind.RLJOB else JOB_LABEL):
                version = int(page["metadata"]["resourceVersion"])
                for item in page["items"]:
                    present.add((kind, item["metadata"]["namespace"], item["metadata"]["name"]))
                    missed += self._enqueue(self._cache.put(kind, item, Source.OTHER))
                await asyncio.sleep(0)  # decoding a page blocks the event loop for a moment; let other tasks run
            swept = self._cache.sweep(kind, present, version, () if namespace is None else (namespace,))
            missed += sum(self._enqueue(key) for key in swept)
        return missed

    def _enqueue(self, key: Key | None) -> int:
        if key is None:
            return 0
        self._add(key)
        return 1


_REMEDY = (
    "install the CRDs of RLJob and KubeRay (rljobs.rljob.dev, rayjobs.ray.io, rayclusters.ray.io) and grant the operator's service account "
    "get, list and watch on them and on pods"
)
