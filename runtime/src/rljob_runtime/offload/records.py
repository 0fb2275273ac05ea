"""What the arbiter reports: who waits, who holds, what is where, what moved. Data only; times are the event loop's, in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rljob_runtime.offload.plan import Device, Direction
from rljob_runtime.offload.states import Residence, StateKind, SwitchReport


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRecord:
    """One call of one worker; a band of the timeline on each of its devices."""

    client: str
    worker: str
    devices: tuple[Device, ...]
    direction: Direction
    kinds: tuple[StateKind, ...]
    started_s: float
    ended_s: float
    residence: Residence
    """Residence of the kinds afterwards."""
    report: SwitchReport | None
    """None when it failed."""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchRecord:
    """All moves that one request, or the end of one lease, made."""

    what: str
    owner: str
    client: str
    waited_s: float
    """In the queue, before the first move."""
    started_s: float
    ended_s: float
    moves: tuple[MoveRecord, ...]
    error: str = ""
    """Why it did not succeed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueEntry:
    """A request that waits."""

    what: str
    owner: str
    client: str
    devices: tuple[Device, ...]
    waiting_s: float
    waits_for: tuple[str, ...]
    """Who holds or moves on its devices, in words; empty when only earlier requests are before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEntry:
    """A lease, or a request whose switch is under way."""

    what: str
    owner: str
    client: str
    token: int
    kinds: frozenset[StateKind]
    devices: tuple[Device, ...]
    held_s: float
    left_s: float | None
    """Until its deadline; None while its switch is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessResidency:
    """One worker on one device."""

    client: str
    worker: str
    alive: bool
    broken: str
    """Why its client is not to be used; empty while it is."""
    states: Mapping[StateKind, Residence]
    num_bytes: int
    """On this device, with what it needs while it computes if it does so now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResidency:
    """What is on a device."""

    device: Device
    budget_bytes: int
    processes: tuple[ProcessResidency, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all processes; what is on its way counts in full."""
        return sum(process.num_bytes for process in self.processes)


def switch_metrics(switches: Sequence[SwitchRecord], waits_s: Iterable[float]) -> dict[str, float]:
    """Metrics of some switches, such as those of one step; names without a value are left out.

    Seconds of a direction: from its first move's start to its last move's end, summed over switches. GB/s: bytes that traveled, of all
    workers together, by the seconds of all switches.
    """
    metrics = {"offload/waits_s": float(sum(waits_s))}
    reports = [move.report for switch in switches for move in switch.moves if move.report is not None]
    if not reports:
        return metrics
    for direction in Direction:
        metrics[f"time/{direction}_s"] = sum(_span_s(m for m in switch.moves if m.direction is direction) for switch in switches)
    copied, seconds = sum(sum(r.copied_bytes.values()) for r in reports), sum(_span_s(switch.moves) for switch in switches)
    snapshots = [snapshot for report in reports for snapshot in (report.before, report.after)]
    return metrics | {
        "offload/bytes": float(copied),
        "offload/gb_per_s": copied / 1e9 / seconds if seconds > 0 else 0.0,
        "memory/device_peak_bytes": float(max(s.peak_bytes for s in snapshots)),
        "memory/host_rss_bytes": float(max(s.host_rss_bytes for s in snapshots)),
        "memory/pinned_bytes": float(max(s.pinned_bytes for s in snapshots)),
    }


def _span_s(moves: Iterable[MoveRecord]) -> float:
    times = [(move.started_s, move.ended_s) for move in moves]
    return max(end for _, end in times) - min(start for start, _ in times) if times else 0.0
