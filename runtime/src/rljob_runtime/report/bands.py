"""Bands of the timeline: from when to when a worker had what on its devices. Computed from the rows of ``switches.jsonl``.

::

    resident            move             resident         move
    |== params, kv_cache ==|/ offload /|== params ==========|/ load /|== ...

The bands of a worker follow each other without a gap, from the first that is known of it to the end of the attempt; where it has nothing
on its devices, ``kinds`` is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.states import Residence
from rljob_runtime.report.jsonl import Row, number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One worker between two changes; times in seconds since the run was first started."""

    client: str
    worker: str
    devices: tuple[Device, ...]
    start_s: float
    end_s: float
    kinds: tuple[str, ...]
    """On the devices, what is on its way included."""
    partly: bool
    """Whether the worker has more kinds than these."""
    broken: bool
    """A switch of it failed so that it is not used any more."""
    move: Row | None
    """Row of the move that is under way; None between moves."""
    before: Row | None
    """Row of the last move before this band."""


@dataclass(slots=True)
class _Worker:
    """What is known of a worker."""

    client: str
    devices: tuple[Device, ...]
    since_s: float
    states: dict[str, Residence] = field(default_factory=dict)
    last: Row | None = None

    def band(self, name: str, end_s: float, move: Row | None = None) -> Band | None:
        """From where the last one ended to ``end_s``; None when that is no time at all."""
        start_s, self.since_s = self.since_s, max(self.since_s, end_s)
        if end_s <= start_s:
            return None
        kinds = {kind for kind, where in self.states.items() if where is not Residence.OFFLOADED}
        if move is not None:
            kinds.update(kinds_of(move))
        return Band(
            client=self.client,
            worker=name,
            devices=self.devices,
            start_s=start_s,
            end_s=end_s,
            kinds=tuple(sorted(kinds)),
            partly=len(kinds) < len(self.states.keys() | kinds),
            broken=Residence.BROKEN in self.states.values(),
            move=move,
            before=self.last,
        )


def bands(rows: Iterable[Row], end_s: float) -> Iterator[Band]:
    """Bands of all workers, as they end; those of the last picture end at ``end_s``."""
    workers: dict[str, _Worker] = {}
    for row in rows:
        match row.get("row"):
            case "start":
                yield from _ends(workers, number_of(row, "at_s"))
                workers.clear()
            case "resident":
                states = row.get("states")
                known = {str(k): Residence(str(v)) for k, v in states.items()} if isinstance(states, dict) else {}
                workers[str(row["worker"])] = _Worker(str(row["client"]), _devices(row), number_of(row, "at_s"), known)
            case "move":
                yield from _moved(workers, row)
    yield from _ends(workers, end_s)


def within(rows: Iterable[Row], windows: Sequence[tuple[float, float]]) -> list[list[Band]]:
    """For each window of time, (start_s, end_s), the bands with something on a device that reach into it, in the order of their ends."""
    found: list[list[Band]] = [[] for _ in windows]
    for band in bands(rows, max((end for _, end in windows), default=0.0)):
        if not band.kinds:
            continue
        for (start_s, end_s), chosen in zip(windows, found, strict=True):
            if band.start_s < end_s and band.end_s > start_s:
                chosen.append(band)
    return found


def kinds_of(move: Row) -> tuple[str, ...]:
    """Kinds that a move moves."""
    kinds = move.get("kinds")
    return tuple(str(kind) for kind in kinds) if isinstance(kinds, list) else ()


def _moved(workers: dict[str, _Worker], row: Row) -> Iterator[Band]:
    name, kinds = str(row["worker"]), kinds_of(row)
    worker = workers.get(name)
    if worker is None:  # its first state is not known
        worker = workers[name] = _Worker(str(row["client"]), _devices(row), number_of(row, "start_s"))
    was = Residence.ON_DEVICE if row.get("direction") == "offload" else Residence.OFFLOADED
    for kind in kinds:
        worker.states.setdefault(kind, was)
    for band in (worker.band(name, number_of(row, "start_s")), worker.band(name, number_of(row, "end_s"), row)):
        if band is not None:
            yield band
    worker.states.update(dict.fromkeys(kinds, Residence(str(row["residence"]))))
    worker.last = row


def _ends(workers: dict[str, _Worker], at_s: float) -> Iterator[Band]:
    for name, worker in workers.items():
        band = worker.band(name, at_s)
        if band is not None:
            yield band


def _devices(row: Row) -> tuple[Device, ...]:
    devices = row.get("devices")
    return tuple(Device(int(node), int(index)) for node, index in devices) if isinstance(devices, list) else ()
