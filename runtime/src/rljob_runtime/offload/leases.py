"""Requests for devices, and the lease that a granted one becomes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_runtime.errors import LeaseLostError
from rljob_runtime.offload.accounts import ClientAccount
from rljob_runtime.offload.plan import SHOWN_DEVICES, Device
from rljob_runtime.offload.states import StateKind


class Stage(StrEnum):
    """How far a claim has come."""

    QUEUED = "queued"
    SWITCHING = "switching"
    """It has its devices, and state is moving."""
    HELD = "held"
    OVER = "over"


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """One request, from its arrival to its end."""

    client: ClientAccount
    what: str
    owner: str
    hold_s: float
    arrived_s: float
    answer: asyncio.Future[None]
    """Done when the devices are held and everything is in place."""
    load: frozenset[StateKind] = frozenset()
    offload: frozenset[StateKind] = frozenset()
    writes: frozenset[StateKind] = frozenset()
    works: bool = False
    """Whether the client computes under it; else only state is moved."""
    stage: Stage = Stage.QUEUED
    abandoned: bool = False
    """Nobody waits for it any more; it ends with its switch."""
    token: int = 0
    since_s: float = 0.0
    """Start of its switch, then of its lease."""
    lost: str = ""
    timer: asyncio.TimerHandle | None = None
    pinned: frozenset[StateKind] = field(default=frozenset())

    @property
    def devices(self) -> tuple[Device, ...]:
        """All of its client's."""
        return self.client.devices

    @property
    def place(self) -> str:
        """Its devices in words."""
        shown = ", ".join(str(device) for device in self.devices[:SHOWN_DEVICES])
        more = len(self.devices) - SHOWN_DEVICES
        return f"{shown} and {more} more" if more > 0 else shown

    def about(self, now_s: float) -> str:
        """For messages of those who wait for it."""
        doing = "moves state" if self.stage is Stage.SWITCHING else "holds it"
        return f"{self.what!r} of {self.owner} ({self.client.name}) {doing} for {now_s - self.since_s:.1f} s"


class Lease:
    """The right to compute on a client's devices, with the state asked for in place, until its deadline."""

    def __init__(self, claim: Claim) -> None:
        """Made by the arbiter."""
        self._claim = claim

    @property
    def what(self) -> str:
        """What it is for."""
        return self._claim.what

    @property
    def owner(self) -> str:
        """Who has it."""
        return self._claim.owner

    @property
    def client(self) -> str:
        """Whose state it is about."""
        return self._claim.client.name

    @property
    def kinds(self) -> frozenset[StateKind]:
        """What it keeps on the devices."""
        return self._claim.pinned

    @property
    def token(self) -> int:
        """Grows with every grant: of two holders of a device the later one has the larger token."""
        return self._claim.token

    @property
    def deadline_s(self) -> float:
        """On the event loop's clock."""
        return self._claim.since_s + self._claim.hold_s

    @property
    def undefined(self) -> frozenset[StateKind]:
        """Kinds on the device without content, which the holder declared to write."""
        return self._claim.client.undefined(self._claim.pinned)

    def check(self) -> None:
        """Call before anything that touches the devices, so that a late holder does no harm.

        Raises:
            LeaseLostError: the lease is over.
        """
        claim = self._claim
        if claim.lost or claim.stage is not Stage.HELD:
            why = claim.lost or "it was given back"
            raise LeaseLostError(f"{claim.what}: the lease of {claim.owner} on {claim.client.name} is over: {why}; ask for a new one")
