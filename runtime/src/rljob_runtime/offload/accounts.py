"""The arbiter's books: what every process has on its devices, and what became of it. No I/O, no clock.

A kind is never ON_DEVICE here before its worker has reported it; what is on its way, or broken, counts with its full size.
"""

from __future__ import annotations

from collections import Counter

from rljob_api.v1alpha1.components import OffloadPolicy
from rljob_runtime.offload.clients import POLICY_FIELDS, ClientProcess, DeviceClient
from rljob_runtime.offload.plan import Direction, Move, ProcessState
from rljob_runtime.offload.records import ProcessResidency
from rljob_runtime.offload.states import Residence, StateKind, SwitchReport

CONTENT_FREE = frozenset({StateKind.KV_CACHE, StateKind.GRADS})
"""Kinds that start empty, so that they need no content to be used."""
_UNDER_WAY = {Direction.OFFLOAD: Residence.OFFLOADING, Direction.LOAD: Residence.LOADING}
_DONE = {Direction.OFFLOAD: Residence.OFFLOADED, Direction.LOAD: Residence.ON_DEVICE}


class ProcessAccount:
    """One worker."""

    def __init__(self, spec: ClientProcess, index: int, resident: frozenset[StateKind]) -> None:
        """``resident``: kinds that are on the device now."""
        self.spec = spec
        self.index = index
        self.size_bytes = dict(spec.size_bytes)
        self.residence = {kind: Residence.ON_DEVICE if kind in resident else Residence.OFFLOADED for kind in spec.size_bytes}
        self.undefined: set[StateKind] = set()
        """Kinds without content: they were not copied, and not written since."""
        self.alive = True
        self.busy = False
        """A switch, or the question whether it is idle, is under way."""
        self.working = False
        """It computes, or may still do so."""
        self._working_bytes = 0
        """What that takes."""

    @property
    def on_device(self) -> frozenset[StateKind]:
        """Kinds that take room."""
        return frozenset(kind for kind, where in self.residence.items() if where is not Residence.OFFLOADED and self.alive)

    @property
    def fixed_bytes(self) -> int:
        """What takes room beside its kinds."""
        return (self.spec.fixed_bytes + self._taken_bytes) if self.alive else 0

    @property
    def num_bytes(self) -> int:
        """What takes room now, on each of its devices."""
        return self.fixed_bytes + sum(self.size_bytes[kind] for kind in self.on_device)

    @property
    def _taken_bytes(self) -> int:
        return self._working_bytes if self.working else 0

    def more_bytes(self, kinds: frozenset[StateKind]) -> int:
        """What comes on top of :attr:`fixed_bytes` when it computes with ``kinds``."""
        partial = self.spec.partial_working_bytes
        needed = self.spec.working_bytes if partial is None or self.spec.size_bytes.keys() <= kinds else partial
        return max(needed - self._taken_bytes, 0)

    def work(self, kinds: frozenset[StateKind]) -> None:
        """It begins to compute with ``kinds``."""
        self._working_bytes = self._taken_bytes + self.more_bytes(kinds)
        self.working = self.alive

    def begin(self, move: Move) -> None:
        """The call is being made. A process that is gone stays as it is, here and below."""
        self._set(move, _UNDER_WAY[move.direction])

    def finish(self, move: Move, report: SwitchReport) -> None:
        """The worker has done it; sizes it reports replace estimates, rounded up to its devices."""
        self._set(move, _DONE[move.direction])
        devices = max(len(self.spec.devices), 1)
        for kind in move.kinds:
            freed = report.freed_bytes.get(kind, 0)
            if freed and kind not in CONTENT_FREE:  # gradients and caches may be smaller now than at their worst
                self.size_bytes[kind] = -(-freed // devices)
        self.undefined |= report.undefined & set(move.kinds) - CONTENT_FREE

    def undo(self, move: Move) -> None:
        """The worker has put everything back."""
        self._set(move, Residence.ON_DEVICE if move.direction is Direction.OFFLOAD else Residence.OFFLOADED)

    def break_(self, move: Move) -> None:
        """Nobody knows where it is."""
        self._set(move, Residence.BROKEN)

    def die(self) -> None:
        """The process is gone, and with it all it had on its devices."""
        self.alive = self.working = False
        self.residence = dict.fromkeys(self.residence, Residence.BROKEN)

    def revive(self) -> None:
        """Another process has taken its place, with everything on the device."""
        self.alive, self.working, self.busy = True, False, False
        self.residence = dict.fromkeys(self.residence, Residence.ON_DEVICE)
        self.undefined.clear()

    def _set(self, move: Move, where: Residence) -> None:
        if self.alive:
            self.residence |= dict.fromkeys(move.kinds, where)


class ClientAccount:
    """One client."""

    def __init__(self, spec: DeviceClient, resident: frozenset[StateKind]) -> None:
        """``resident``: kinds that are on its devices now."""
        self.spec = spec
        self.devices = tuple(sorted(spec.devices))
        self.processes = [ProcessAccount(process, i, resident) for i, process in enumerate(spec.processes)]
        self.broken = ""
        """Why it is not to be used any more."""
        self.pins: Counter[StateKind] = Counter()
        """Leases per kind."""
        self.leases = 0
        """That let it compute."""
        self.queued = 0
        """Claims that wait."""
        self.leaving: set[StateKind] = set()
        """Kinds that are to leave as soon as they are not in use."""
        self.doubtful = False
        """A block of it ended early, so that its workers may still be at work."""
        self.last_used = 0

    @property
    def name(self) -> str:
        """The client's name."""
        return self.spec.name

    def revive(self) -> None:
        """Its workers were replaced: it may be used again."""
        self.broken, self.doubtful = "", False
        for process in self.processes:
            process.revive()

    def undefined(self, kinds: frozenset[StateKind]) -> frozenset[StateKind]:
        """Those without content in some process."""
        return kinds & {kind for process in self.processes for kind in process.undefined}

    def written(self, kinds: frozenset[StateKind]) -> None:
        """Somebody gave them content."""
        for process in self.processes:
            process.undefined -= kinds

    def state(self, process: ProcessAccount, kinds: frozenset[StateKind]) -> ProcessState:
        """What the planner needs to know, should it compute with ``kinds``."""
        return ProcessState(
            client=self.name,
            index=process.index,
            devices=process.spec.devices,
            size_bytes=process.size_bytes,
            on_device=process.on_device,
            fixed_bytes=process.fixed_bytes,
            working_bytes=process.more_bytes(kinds),
            stays={kind: why for kind in process.on_device if (why := self._why_stays(process, kind))},
            leaving=frozenset(self.leaving),
            free_to_drop=CONTENT_FREE | self.spec.rederivable,
            leaves_alone=self.spec.leaves_alone,
            last_used=self.last_used,
            queued=self.queued > 0,
        )

    def residency(self, process: ProcessAccount) -> ProcessResidency:
        """For people."""
        return ProcessResidency(
            client=self.name,
            worker=process.spec.worker.name,
            alive=process.alive,
            broken=self.broken,
            states=dict(process.residence),
            num_bytes=process.num_bytes,
        )

    def _why_stays(self, process: ProcessAccount, kind: StateKind) -> str:
        if self.broken:
            return "its component is broken"
        if self.pins[kind]:
            return "in use"
        if process.busy:
            return "on its way"
        if self.spec.policy(kind) is OffloadPolicy.NEVER:
            return f"components[].offload.{POLICY_FIELDS.get(kind, kind)} is Never, or spec.offload.residency Resident"
        return ""
