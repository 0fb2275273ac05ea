"""Who waits for which devices and who holds them: the arbiter's queue, without a clock and without I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import count

from rljob_runtime.offload.accounts import ClientAccount, ProcessAccount
from rljob_runtime.offload.leases import Claim, Stage
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.records import LeaseEntry, QueueEntry


class ClaimBook:
    """Every claim from its arrival to its end."""

    def __init__(self, devices: Iterable[Device]) -> None:
        """``devices``: all that can be claimed."""
        self.on: dict[Device, list[tuple[ClientAccount, ProcessAccount]]] = {device: [] for device in devices}
        """Processes by device."""
        self.queue: dict[Claim, None] = {}
        """In order of arrival."""
        self.granted: dict[Claim, None] = {}
        """In order of their grants."""
        self._holders: dict[Device, dict[Claim, None]] = {device: {} for device in self.on}
        self._owners: Counter[str] = Counter()
        self._tokens = count(1)

    def enqueue(self, claim: Claim) -> None:
        """A new claim."""
        self.queue[claim] = None
        claim.client.queued += 1

    def dequeue(self, claim: Claim) -> None:
        """It no longer waits for devices; nothing where it did not."""
        if claim in self.queue:
            del self.queue[claim]
            claim.client.queued -= 1

    def in_turn(self) -> list[Claim]:
        """The queue: owners who hold something first, because others may wait for them; then by arrival."""
        return sorted(self.queue, key=lambda claim: not self.is_nested(claim))

    def is_nested(self, claim: Claim) -> bool:
        """Whether its owner holds a lease already."""
        return self._owners[claim.owner] > 0

    def is_free(self, claim: Claim) -> bool:
        """Whether no other claim holds its devices and nothing moves there."""
        return all(
            all(holder.owner == claim.owner for holder in self._holders[device])
            and not any(process.busy and process.alive for _, process in self.on[device])
            for device in claim.devices
        )

    def hold(self, claim: Claim, now_s: float) -> None:
        """Give it its devices."""
        self.dequeue(claim)
        claim.stage, claim.token, claim.since_s = Stage.SWITCHING, next(self._tokens), now_s
        self.granted[claim] = None
        self._count_owner(claim.owner, 1)
        for device in claim.devices:
            self._holders[device][claim] = None
        account = claim.client
        claim.pinned = claim.load
        account.pins.update(claim.pinned)
        account.leaving -= claim.load
        if claim.works:
            account.leases += 1
            for process in account.processes:
                process.work(claim.load)

    def unhold(self, claim: Claim) -> None:
        """Take its devices away."""
        claim.stage = Stage.OVER
        del self.granted[claim]
        self._count_owner(claim.owner, -1)
        for device in claim.devices:
            del self._holders[device][claim]
        claim.client.pins.subtract(claim.pinned)
        if claim.works:
            claim.client.leases -= 1
            claim.client.last_used = next(self._tokens)
        if claim.timer is not None:
            claim.timer.cancel()

    def disown(self, claim: Claim) -> None:
        """Nobody waits for it any more: while its switch goes on, it is no reason to prefer its owner."""
        if claim in self.granted:
            self._count_owner(claim.owner, -1)
            claim.owner = f"no one, formerly {claim.owner}"
            self._count_owner(claim.owner, 1)

    def unpin_own(self, claim: Claim) -> None:
        """What a claim takes away is no longer part of its owner's other leases of the client."""
        for other in self.granted if claim.offload else ():  # only its owner can have any: devices are exclusive
            gone = other.pinned & claim.offload
            if other.client is claim.client and gone:
                other.pinned -= gone
                other.client.pins.subtract(gone)

    def obstacles(self, claim: Claim, now_s: float) -> list[str]:
        """What is between a claim and its devices, each once, in words."""
        found: dict[str, None] = {}
        if claim.stage is Stage.SWITCHING:
            found[f"its own switch has been under way for {now_s - claim.since_s:.1f} s"] = None
        for device in claim.devices:
            for holder in self._holders[device]:
                if holder.owner != claim.owner:
                    found[holder.about(now_s)] = None
            for account, process in self.on[device]:
                if process.busy and process.alive:
                    doing = ", ".join(f"{kind} {where}" for kind, where in process.residence.items())
                    found[f"{process.spec.worker.name} moves state or has not answered that it is idle ({doing})"] = None
                if account.broken:
                    found[f"{account.name} is broken"] = None
        return list(found)

    def earlier(self, claim: Claim) -> list[str]:
        """Requests before it in the queue that want some of its devices, as one clause or none."""
        devices = set(claim.devices)
        before = []
        for other in self.queue:
            if other is claim:
                break
            if not devices.isdisjoint(other.devices):
                before.append(other)
        if not before or claim not in self.queue:
            return []
        return [f"{len(before)} earlier request{'s' if len(before) > 1 else ''}, first {before[0].what!r} of {before[0].owner}"]

    def _count_owner(self, owner: str, change: int) -> None:
        self._owners[owner] += change
        if not self._owners[owner]:
            del self._owners[owner]

    def queue_entries(self, now_s: float) -> list[QueueEntry]:
        """Who waits, in order."""
        return [
            QueueEntry(
                what=claim.what,
                owner=claim.owner,
                client=claim.client.name,
                devices=claim.devices,
                waiting_s=now_s - claim.arrived_s,
                waits_for=tuple(self.obstacles(claim, now_s)),
            )
            for claim in self.queue
        ]

    def lease_entries(self, now_s: float) -> list[LeaseEntry]:
        """Who holds devices, in the order of their grants."""
        return [
            LeaseEntry(
                what=claim.what,
                owner=claim.owner,
                client=claim.client.name,
                token=claim.token,
                kinds=claim.pinned,
                devices=claim.devices,
                held_s=now_s - claim.since_s,
                left_s=claim.since_s + claim.hold_s - now_s if claim.stage is Stage.HELD else None,
            )
            for claim in self.granted
        ]
