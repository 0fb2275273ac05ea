"""Which of several operators acts: an election by a Lease, as client-go's leader election does it.

::

    stand by --lease free, released, or unchanged for LEASE_S--> patch with its resourceVersion --> lead
    lead --every RENEW_S a patch--> lead --none succeeded for HOLD_S, or another holder--> stand by

Clocks of different machines are not compared: a lease has expired when this process has seen it unchanged for its duration.
HOLD_S is less than LEASE_S, so a leader that cannot renew stops before another begins, also one that was stopped and continues
(:class:`Leadership` reads the clock). What it had sent before is harmless: children are created under names that only the stored status
increments, deletions name a UID, a status names the version that it is derived from.

The lease costs one small write every RENEW_S. kopf's peering is no alternative: its records are custom resources without preconditions,
and operators of equal priority pause each other.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rljob_operator.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from rljob_operator.model import Manifest
from rljob_operator.protocol import Kind, KubeClient

LEASE_S: Final = 15
"""Time after which others take a lease that nobody renews."""
HOLD_S: Final = 10.0
"""How long a renewal lets this process write."""
RENEW_S: Final = 2.5
"""Time between two renewals, and between two looks at the lease of another."""
RETRY_S: Final = 0.5
"""The same for a leader after a renewal that failed: one that timed out has used up most of HOLD_S already."""

logger = logging.getLogger(__name__)


class Leadership:
    """Until when this process may write."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """``clock_s`` goes on while the process is stopped."""
        self.clock_s = clock_s
        self._until_s = 0.0

    @property
    def remaining_s(self) -> float:
        """Seconds for which this process may write; 0 or less: it may not."""
        return self._until_s - self.clock_s()

    def holds(self) -> bool:
        """Whether this process may write now."""
        return self.remaining_s > 0

    def extend(self, until_s: float) -> None:
        """May write until this time of the clock."""
        self._until_s = until_s

    def end(self) -> None:
        """May not write any more."""
        self._until_s = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A lease as last read, and when this process first saw it so."""

    version: str
    holder: str
    duration_s: float
    transitions: int
    since_s: float


class Election:
    """Takes, renews and releases one lease."""

    def __init__(
        self,
        client: KubeClient,
        leadership: Leadership,
        *,
        lease: str,
        identity: str,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``lease`` is "namespace/name"; ``identity`` is of this process alone; ``jitter`` (0 to 1) keeps candidates apart."""
        self._client = client
        self._leadership = leadership
        self._namespace, _, self._name = lease.partition("/")
        self._identity = identity
        self._clock_s = leadership.clock_s
        self._jitter = jitter
        self._record: _Record | None = None
        self._is_record_old = True
        """Whether the lease has to be read before the next write."""

    async def run(self) -> None:
        """Take the lease when it is free and renew it, until cancelled."""
        while True:
            await asyncio.sleep(await self.step())

    async def step(self) -> float:
        """Renew the lease, take it, or look at it; an error is logged. Returns the seconds until the next step, which tries again."""
        began_s, is_done = self._clock_s(), True
        try:
            if self._is_record_old or not self._leadership.holds():
                await self._look()
            if self._is_free():
                await self._take()
                self._leadership.extend(began_s + HOLD_S)
        except ConflictError:
            # Another candidate was faster, or an own write whose answer did not arrive; the next look shows which.
            self._is_record_old = True
            is_done = False
        except KubeError as error:
            logger.warning("lease %s/%s: %s; trying again soon", self._namespace, self._name, error)
            is_done = False
        return RETRY_S if self._leadership.holds() and not is_done else RENEW_S * (1 + 0.2 * self._jitter())

    async def release(self) -> None:
        """Hand the lease back, so that another operator takes it at its next look."""
        held, self._record = self._record, None
        self._leadership.end()
        if held is None or held.holder != self._identity:
            return
        change = {"metadata": {"resourceVersion": held.version}, "spec": {"holderIdentity": None, "leaseDurationSeconds": 1}}
        try:
            await self._client.patch_merge(Kind.LEASE, self._namespace, self._name, change)
        except KubeError as error:
            logger.warning("lease %s/%s was not released and expires in %d s: %s", self._namespace, self._name, LEASE_S, error)

    async def _look(self) -> None:
        """Read the lease, creating it where there is none."""
        try:
            stored = await self._client.get(Kind.LEASE, self._namespace, self._name)
        except NotFoundError:
            metadata = {"namespace": self._namespace, "name": self._name}
            try:
                stored = await self._client.create({"apiVersion": Kind.LEASE.api_version, "kind": str(Kind.LEASE), "metadata": metadata})
            except AlreadyExistsError:
                return  # another candidate was faster; the next look shows it
        self._remember(stored)
        if self._record is not None and self._record.holder != self._identity:
            self._leadership.end()

    def _is_free(self) -> bool:
        """Whether the lease is this process's own, nobody's, or of one that has not renewed it in time."""
        record = self._record
        if record is None:
            return False
        return record.holder in ("", self._identity) or self._clock_s() - record.since_s > record.duration_s

    async def _take(self) -> None:
        """Write this process into the version of the lease that was read."""
        record = self._record
        if record is None:
            raise TypeError("took a lease that was never read")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: Manifest = {"holderIdentity": self._identity, "leaseDurationSeconds": LEASE_S, "renewTime": now}
        if record.holder != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": record.transitions + 1}
        change = {"metadata": {"resourceVersion": record.version}, "spec": spec}
        self._remember(await self._client.patch_merge(Kind.LEASE, self._namespace, self._name, change))

    def _remember(self, stored: Manifest) -> None:
        version: str = stored["metadata"]["resourceVersion"]
        self._is_record_old = False
        if self._record is not None and self._record.version == version:
            return
        spec: dict[str, Any] = stored.get("spec") or {}
        self._record = _Record(
            version=version,
            holder=spec.get("holderIdentity") or "",
            duration_s=float(spec.get("leaseDurationSeconds") or LEASE_S),
            transitions=int(spec.get("leaseTransitions") or 0),
            since_s=self._clock_s(),
        )
