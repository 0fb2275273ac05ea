"""Who leaves a device and who comes, in which order: pure decisions, bytes throughout.

::

    processes on the devices, request ── plan_switch ──> waves of moves
                                                         wave 1   offload kv cache | load what fits already
                                                         wave 2   offload optimizer | load what fits now
                                                         ...

All moves of a wave run at the same time and a wave begins when the one before has ended, so copies go both ways at once. RESIDENT: what
is loaded in a wave fits beside everything that is still there at its start, also beside what leaves in the same wave. Where that is not
known, and where an engine measures its device while it leaves, what leaves is gone before anything comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from rljob_api.memory.units import show_bytes
from rljob_runtime.errors import NoRoomError
from rljob_runtime.offload.states import StateKind

EVICTION_ORDER: Mapping[StateKind, int] = MappingProxyType(
    {StateKind.KV_CACHE: 0, StateKind.GRADS: 1, StateKind.OPTIMIZER: 3, StateKind.PARAMS: 4, StateKind.OTHER: 5}
)
"""What is least needed goes first: re-derivable state costs no copy; CUDA graphs (``OTHER``) cost more than a copy to have again."""
DROPPED = 2
"""Place in that order of any other kind that needs no copy."""
LOAD_ORDER: tuple[StateKind, ...] = (StateKind.PARAMS, StateKind.OTHER, StateKind.OPTIMIZER, StateKind.GRADS, StateKind.KV_CACHE)
"""Weights first, a KV cache takes what is left."""
UNKNOWN_BYTES = 1 << 60
"""Budget of a device of unknown memory, or whose processes' sizes are not known: everything idle leaves it, before anything comes."""
SHOWN_DEVICES = 3
"""Devices whose arithmetic an error spells out."""


class Device(NamedTuple):
    """One device of the job."""

    node_rank: int
    local_index: int
    """On its node."""

    def __str__(self) -> str:
        return f"node {self.node_rank} device {self.local_index}"


class Direction(StrEnum):
    """Which way a move goes; the values are the worker's methods."""

    OFFLOAD = "offload"
    LOAD = "load"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """What one process of a client has on each of its devices."""

    client: str
    index: int
    """Among the client's processes."""
    devices: tuple[Device, ...]
    size_bytes: Mapping[StateKind, int]
    """On each of the devices, whether it is there now or not."""
    on_device: frozenset[StateKind]
    fixed_bytes: int = 0
    """What it has there as long as it lives, and what an unfinished call of it may still take."""
    working_bytes: int = 0
    """What comes on top while it computes under a lease."""
    stays: Mapping[StateKind, str] = field(default_factory=dict)
    """Kinds that may not leave, and why."""
    leaving: frozenset[StateKind] = frozenset()
    """Kinds that leave whether or not room is needed."""
    free_to_drop: frozenset[StateKind] = frozenset()
    """Kinds that are not copied when they leave."""
    leaves_alone: bool = False
    """Whether nothing may come to its devices while it gives something up."""
    last_used: int = 0
    """Grows with every lease of the client."""
    queued: bool = False
    """Whether its client waits for a lease: needed sooner than others."""

    @property
    def resident_bytes(self) -> int:
        """On each of its devices, now."""
        return self.fixed_bytes + sum(self.size_bytes[kind] for kind in self.on_device)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRequest:
    """What should be on the devices afterwards."""

    client: str
    what: str
    """For messages, such as ``train step 12``."""
    load: frozenset[StateKind] = frozenset()
    offload: frozenset[StateKind] = frozenset()
    works: bool = False
    """Whether its ``working_bytes`` need room as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One call of one worker."""

    client: str
    index: int
    direction: Direction
    kinds: tuple[StateKind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Moves that run at the same time; at most one each way per process."""

    offloads: tuple[Move, ...]
    loads: tuple[Move, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """Waves, one after the other; none when everything is in place."""

    waves: tuple[Wave, ...]

    @property
    def processes(self) -> set[tuple[str, int]]:
        """All that move something, as (client, index)."""
        return {(move.client, move.index) for wave in self.waves for move in (*wave.offloads, *wave.loads)}


class _Unit(NamedTuple):
    """A kind of one process: what a move consists of."""

    process: ProcessState
    kind: StateKind

    @property
    def num_bytes(self) -> int:
        return self.process.size_bytes[self.kind]

    @property
    def key(self) -> tuple[str, int]:
        return self.process.client, self.process.index

    @property
    def is_copied(self) -> bool:
        return self.kind not in self.process.free_to_drop

    @property
    def eviction_key(self) -> tuple[int, bool, int, str, int, str]:
        """Ascending: what to evict first."""
        process = self.process
        rank = EVICTION_ORDER[self.kind] if self.is_copied else min(EVICTION_ORDER[self.kind], DROPPED)
        return rank, process.queued, process.last_used, process.client, process.index, self.kind


def plan_switch(budget_bytes: Mapping[Device, int], processes: Sequence[ProcessState], request: SwitchRequest) -> Switch:
    """Bring what the request wants, take away what is in its way, and what is to leave anyway.

    Args:
        budget_bytes: what may be resident on each device of the request's client.
        processes: all that are on these devices; their other devices only gain room.
        request: of one client.

    Returns:
        Waves that never have more than the budget resident on any device. Time grows with processes times their devices.

    Raises:
        NoRoomError: it cannot fit; per device both numbers, what would come, what stays and why.
    """
    coming = [
        _Unit(process, kind)
        for kind in LOAD_ORDER
        for process in processes
        if process.client == request.client and kind in request.load and kind in process.size_bytes and kind not in process.on_device
    ]
    leaving, candidates = _departures(processes, request)
    room = {device: budget_bytes[device] for p in processes if p.client == request.client for device in p.devices}
    for process in processes:
        _add(room, process.devices, -process.resident_bytes)
    short = {device: -free for device, free in room.items()}
    for unit in coming:
        _add(short, unit.process.devices, unit.num_bytes)
    if request.works:
        for process in processes:
            if process.client == request.client:
                _add(short, process.devices, process.working_bytes)
    for unit in leaving:
        _add(short, unit.process.devices, -unit.num_bytes)
    if coming or request.works:  # who only leaves is never refused
        evicted = _evictions(short, candidates)
        if any(num_bytes > 0 for num_bytes in short.values()):
            staying = {(u.key, u.kind) for u in (*leaving, *evicted)}
            raise NoRoomError(_arithmetic(budget_bytes, short, processes, staying, request))
        leaving += evicted
    leaving.sort(key=lambda unit: unit.eviction_key)
    unknown = {device for device in room if budget_bytes[device] >= UNKNOWN_BYTES}
    return Switch(waves=tuple(_waves(room, leaving, coming, unknown)))


def _departures(processes: Iterable[ProcessState], request: SwitchRequest) -> tuple[list[_Unit], list[_Unit]]:
    """(what leaves in any case, what could leave), the latter in the order of eviction."""
    leaving: list[_Unit] = []
    candidates: list[_Unit] = []
    for process in processes:
        own = process.client == request.client
        for kind in process.on_device:
            if kind in process.stays or (own and kind in request.load):
                continue
            goes = kind in process.leaving or (own and kind in request.offload)
            (leaving if goes else candidates).append(_Unit(process, kind))
    candidates.sort(key=lambda unit: unit.eviction_key)
    return leaving, candidates


def _evictions(short: dict[Device, int], candidates: Iterable[_Unit]) -> list[_Unit]:
    """Take candidates in order while a device is short; then let those stay that later, larger ones made needless.

    ``short`` is what is missing per device before, and what is still missing (or spare, below 0) afterwards.
    """
    missing = {device for device, num_bytes in short.items() if num_bytes > 0}
    taken = []
    for unit in candidates:
        if not missing:
            break
        if unit.num_bytes and not missing.isdisjoint(unit.process.devices):
            taken.append(unit)
            _add(short, unit.process.devices, -unit.num_bytes)
            missing -= {device for device in unit.process.devices if short.get(device, 0) <= 0}
    if missing:
        return taken
    kept = []
    for unit in taken:
        if unit.is_copied and all(short.get(device, -unit.num_bytes) + unit.num_bytes <= 0 for device in unit.process.devices):
            _add(short, unit.process.devices, unit.num_bytes)
        else:
            kept.append(unit)
    return kept


def _waves(room: dict[Device, int], outs: list[_Unit], ins: list[_Unit], unknown: set[Device]) -> Iterable[Wave]:
    """In each wave whatever fits comes; while something waits for room, processes give up one copied kind at a time, to overlap.

    Before the first of them goes what must not overlap with what comes to its devices.
    """
    first, outs = _apart(outs, ins, unknown)
    if first:
        yield Wave(offloads=_moves(first, Direction.OFFLOAD), loads=())
    for unit in first:
        _add(room, unit.process.devices, unit.num_bytes)
    while outs or ins:
        now, ins = _fitting(room, ins)
        gone, outs = _next_outs(outs) if ins else (outs, [])
        if not now and not gone:
            raise AssertionError(f"nothing can move, although room was found for {ins}")
        yield Wave(offloads=_moves(gone, Direction.OFFLOAD), loads=_moves(now, Direction.LOAD))
        for unit in gone:
            _add(room, unit.process.devices, unit.num_bytes)


def _apart(outs: Iterable[_Unit], ins: Iterable[_Unit], unknown: set[Device]) -> tuple[list[_Unit], list[_Unit]]:
    """(what must be gone before anything comes, the rest)."""
    coming = {device for unit in ins for device in unit.process.devices}
    first: list[_Unit] = []
    rest: list[_Unit] = []
    for unit in outs:
        met = coming.intersection(unit.process.devices)
        (first if met and (unit.process.leaves_alone or met & unknown) else rest).append(unit)
    return first, rest


def _fitting(room: dict[Device, int], ins: Iterable[_Unit]) -> tuple[list[_Unit], list[_Unit]]:
    """(what fits now, what waits); the kinds of one process keep their order. Takes the room."""
    now: list[_Unit] = []
    waiting: list[_Unit] = []
    blocked: set[tuple[str, int]] = set()
    for unit in ins:
        if unit.key in blocked or any(room[device] < unit.num_bytes for device in unit.process.devices):
            blocked.add(unit.key)
            waiting.append(unit)
        else:
            _add(room, unit.process.devices, -unit.num_bytes)
            now.append(unit)
    return now, waiting


def _next_outs(outs: Iterable[_Unit]) -> tuple[list[_Unit], list[_Unit]]:
    """For every process, what costs nothing, and the first kind that is copied."""
    gone: list[_Unit] = []
    later: list[_Unit] = []
    copying: set[tuple[str, int]] = set()
    for unit in outs:
        if unit.is_copied and unit.key in copying:
            later.append(unit)
            continue
        if unit.is_copied:
            copying.add(unit.key)
        gone.append(unit)
    return gone, later


def _moves(units: Iterable[_Unit], direction: Direction) -> tuple[Move, ...]:
    """One per process."""
    kinds: dict[tuple[str, int], list[StateKind]] = {}
    for unit in units:
        kinds.setdefault(unit.key, []).append(unit.kind)
    return tuple(Move(client=client, index=i, direction=direction, kinds=tuple(some)) for (client, i), some in kinds.items())


def _add(totals: dict[Device, int], devices: Iterable[Device], num_bytes: int) -> None:
    for device in devices:
        if device in totals:
            totals[device] += num_bytes


def _arithmetic(
    budget_bytes: Mapping[Device, int],
    short: Mapping[Device, int],
    processes: Sequence[ProcessState],
    gone: set[tuple[tuple[str, int], StateKind]],
    request: SwitchRequest,
) -> str:
    """Why it cannot fit, device by device."""
    full = sorted(device for device, num_bytes in short.items() if num_bytes > 0)
    parts = []
    for device in full[:SHOWN_DEVICES]:
        terms = []
        for process in processes:
            if device in process.devices:
                terms += _terms(process, {kind for key, kind in gone if key == (process.client, process.index)}, request)
        needed = show_bytes(budget_bytes[device] + short[device])
        parts.append(f"{device} has {show_bytes(budget_bytes[device])}, {needed} are needed: {', '.join(terms)}")
    more = f"; and {len(full) - SHOWN_DEVICES} more devices" if len(full) > SHOWN_DEVICES else ""
    return (
        f"{request.what}: {request.client} has no room. {'; '.join(parts)}{more}. Let more leave (components[].offload), spread "
        "the components over more devices, or make them smaller"
    )


def _terms(process: ProcessState, gone: set[StateKind], request: SwitchRequest) -> list[str]:
    """What one process contributes, largest facts first: what comes, what stays."""
    name, terms = process.client, []
    own = process.client == request.client
    for kind in LOAD_ORDER:
        size = process.size_bytes.get(kind, 0)
        if not size or kind in gone:
            continue
        if own and kind in request.load:
            terms.append(f"{name} {kind} {show_bytes(size)} (asked for)")
        elif kind in process.on_device:
            terms.append(f"{name} {kind} {show_bytes(size)} ({process.stays.get(kind, 'stays')})")
    if own and request.works and process.working_bytes:
        terms.append(f"{name} work {show_bytes(process.working_bytes)}")
    if process.fixed_bytes:
        terms.append(f"{name} process {show_bytes(process.fixed_bytes)} (always there)")
    return terms
