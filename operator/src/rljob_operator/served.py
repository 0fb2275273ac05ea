"""Keeps :class:`~rljob_operator.skew.Skew` current: asks the API server now and then which CRD it serves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from rljob_api.crd.schema import job_schema
from rljob_operator import skew
from rljob_operator.errors import KubeError
from rljob_operator.metrics import Metrics
from rljob_operator.protocol import KubeClient

PERIOD_S: Final = 5.0
"""Seconds between two looks. One costs some ten kilobytes, which name the version of each schema; the schema is read when it is another."""

logger = logging.getLogger(__name__)


class ServedSchema:
    """The fields of RLJobs that the API server and this operator do not share."""

    def __init__(self, client: KubeClient, metrics: Metrics, on_change: Callable[[], None] = lambda: None) -> None:
        """``on_change`` is called after a change, which may turn refused specs into accepted ones."""
        self._client = client
        self._metrics = metrics
        self._on_change = on_change
        self._version: str | None = None
        self._skew = skew.Skew()
        self._seen: list[skew.Skew] = []
        """All with unknown fields so far: a CRD that loses a field changes no object's version, so that the cache keeps the default."""

    def known(self, spec: Mapping[str, Any]) -> Mapping[str, Any]:
        """A spec without unknown fields that have their defaults."""
        for seen in self._seen:
            spec = seen.known(spec)
        return spec

    def storable(self, status: Mapping[str, Any]) -> Mapping[str, Any]:
        """A status without fields that the CRD lacks."""
        return self._skew.storable(status)

    async def run(self) -> None:
        """Look now and then, until cancelled."""
        while True:
            try:
                await self.look()
            except KubeError as error:
                logger.debug("the served CRD is not known: %s", error)
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Read the schema if it is another one than at the last look.

        Raises:
            KubeError: it cannot be read.
        """
        version = await self._client.schema_version()
        if version == self._version:
            return
        found = skew.compare(await self._client.schema(version), job_schema()["properties"])
        self._version = version
        self._metrics.crd_fields.labels("missing").set(len(found.missing))
        self._metrics.crd_fields.labels("unknown").set(len(found.unknown))
        if found == self._skew:
            return
        self._skew = found
        if found.unknown and found not in self._seen:
            self._seen.append(found)
        for text in skew.describe(found) or ["the CRD rljobs.rljob.dev is this operator's again"]:
            logger.warning("%s", text)
        self._on_change()
