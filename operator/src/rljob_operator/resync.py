"""Full lists: once before anything is decided, later every few minutes against what a watch may have lost.

A watch that was cut for longer than the API server remembers starts from a new list, which cannot tell what was deleted in between.
Only comparing with a full list finds that. What a list tells before the watch did is counted, and a watch that owes something for
long makes the liveness probe fail.
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
"""Limit for the lists at the start, waiting for the API server and the CRDs included."""
RETRY_S: Final = 2.0

logger = logging.getLogger(__name__)


class Resync:
    """Compares the cache with full lists."""

    def __init__(
        self, client: KubeClient, cache: Cache, add: Callable[[Key], None], *, namespaces: tuple[str, ...], metrics: Metrics
    ) -> None:
        """``add`` is told of every job to look at; ``namespaces`` empty: all."""
        self._client = client
        self._cache = cache
        self._add = add
        self._namespaces = namespaces
        self._metrics = metrics

    async def first(self) -> None:
        """List everything; tries again while the API server or a CRD is missing.

        Raises:
            SettingsError: a kind is not installed, or may not be listed, or the API server did not answer within 120 s.
        """
        deadline = asyncio.get_running_loop().time() + FIRST_DEADLINE_S
        while True:
            try:
                for kind in WATCHED:
                    await self._list(kind)
            except KubeError as error:
                if not isinstance(error, NotFoundError | UnavailableError) or asyncio.get_running_loop().time() > deadline:
                    raise SettingsError(f"cannot list what the operator watches: {error}; {_REMEDY}") from error
                logger.warning("waiting for what the operator watches: %s; %s", error, _REMEDY)
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def run(self) -> None:
        """Compare every five minutes, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.compare()

    async def compare(self) -> None:
        """Compare once. A list that fails is only logged: the next one comes."""
        for kind in WATCHED:
            try:
                missed = await self._list(kind)
            except KubeError as error:
                logger.warning("no comparison with a full list this time: %s", error)
                continue
            if missed:
                self._metrics.missed_objects.labels(kind).inc(missed)
                logger.info("a full list told of %d changes of %ss before the watch did", missed, kind)

    async def _list(self, kind: Kind) -> int:
        """List one kind; how many objects told something new."""
        missed = 0
        for namespace in self._namespaces or (None,):
            present: set[ObjectKey] = set()
            version = 0
            async for page in self._client.pages(kind, namespace, "" if kind is Kind.RLJOB else JOB_LABEL):
                version = int(page["metadata"]["resourceVersion"])
                for item in page["items"]:
                    present.add((kind, item["metadata"]["namespace"], item["metadata"]["name"]))
                    missed += self._wake(self._cache.put(kind, item, Source.OTHER))
                await asyncio.sleep(0)  # a page of objects takes the event loop for a moment; let others in
            swept = self._cache.sweep(kind, present, version, () if namespace is None else (namespace,))
            missed += sum(self._wake(key) for key in swept)
        return missed

    def _wake(self, key: Key | None) -> int:
        if key is None:
            return 0
        self._add(key)
        return 1


_REMEDY = (
    "install the CRDs of RLJob and KubeRay (rljobs.rljob.dev, rayjobs.ray.io, rayclusters.ray.io) and give the operator's account "
    "get, list and watch on them and on pods"
)
