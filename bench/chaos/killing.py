"""Shared memory transport that kills a process on command: the first process to reach the ordered phase of a sync sends itself SIGKILL.

A sync of a tiny model takes milliseconds, which no signal from outside hits.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rljob_runtime.cluster.protocol import Pending
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.weightsync.assembly import Part, UpdateAssembly
from rljob_runtime.weightsync.parcel import Parcel, Payload
from rljob_runtime.weightsync.transport import Shapes, SyncLink
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport, SharedReceiver, SharedSender
from rljob_runtime.weightsync.transports.tested import TEST_VERSION

ORDERS = "RLJOB_CHAOS_ORDERS"
"""Environment of every process: a file with the phase in which one is to die; it is gone once one does."""
PHASES = {
    "trainer killed as it sends weights": "send",
    "engine killed as a sync begins": "begin",
    "engine killed as it takes weights": "take",
    "engine killed as weights go into its model": "receive",
    "driver killed in a sync": "transfer",
}
PROGRAM = f"""
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_runtime.weightsync.transports import TRANSPORTS
TRANSPORTS[SyncBackend.SHARED_MEMORY] = "{__name__}:KillingTransport"
"""
"""What a driver runs first."""


def obey(phase: str) -> None:
    """Kill this process if this phase is ordered; an order is used once."""
    orders = Path(os.environ[ORDERS])
    try:
        if orders.read_text() != phase:
            return
        orders.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class KillingTransport(SharedMemoryTransport):
    """The driver's part, which makes the ends below."""

    async def prepare(self, link: SyncLink) -> None:
        """As shared memory does."""
        await super().prepare(_KillingLink(link))  # type: ignore[arg-type]

    async def transfer(self, version: int, link: SyncLink) -> dict[int, int]:
        """As shared memory does."""
        obey("transfer")
        return await super().transfer(version, link)


class _KillingLink:
    """A link that replaces sender and receiver by the killing ones."""

    def __init__(self, link: SyncLink) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def on_trainers(self, method: str, *args: Any) -> list[Pending]:
        ends = (f"{__name__}:{KillingSender.__name__}", *args[1:]) if method == "prepare_sender" else args
        return self._link.on_trainers(method, *ends)

    def on_engines(self, method: str, *args: Any) -> dict[int, Pending]:
        ends = (f"{__name__}:{KillingReceiver.__name__}", *args[1:]) if method == "prepare_receiver" else args
        return self._link.on_engines(method, *ends)


class KillingSender(SharedSender):
    """A trainer rank's end."""

    def send(self, version: int, part: int) -> Parcel | None:
        """As shared memory does."""
        if version != TEST_VERSION:
            obey("send")
        return super().send(version, part)


class KillingReceiver(SharedReceiver):
    """An engine's end."""

    def begin(self, manifest: WeightManifest, version: int, expected: Shapes | None) -> UpdateAssembly:
        """Open an update."""
        obey("begin")
        return _KillingUpdate(manifest, version, expected, streams=self._streams, proves_late=self._proves_late, images=self._images)


class _KillingUpdate(UpdateAssembly):
    def take(self, part: int, data: Part) -> None:
        obey("take")
        super().take(part, data)

    def receive(self, deadline: float) -> Iterator[tuple[Bucket, Payload]]:
        obey("receive")
        yield from super().receive(deadline)
