"""``switches.jsonl``: what was on the devices at the start, every move of state since, and memory before and after each.

One row a line; ``step`` is the step that was under way, times are seconds since the run was first started, sizes are bytes.

| row        | keys beside ``row`` and ``step``                                                                                      |
|------------|-----------------------------------------------------------------------------------------------------------------------|
| `start`    | at_s; earlier rows about the devices no longer hold                                                                    |
| `resident` | at_s, client, worker, devices, states {kind: OnDevice, Offloaded, ...}, bytes (on each device)                        |
| `move`     | client, worker, devices, direction, kinds, start_s, end_s, what, waited_s, residence (of the kinds afterwards),       |
|            | elapsed_s (of the worker itself), copied_bytes and freed_bytes {kind: bytes}, before and after {allocated, reserved,  |
|            | peak, host_rss, pinned}; ``error`` in place of the worker's figures where it failed                                   |

A row takes about 600 bytes, and a worker moves a few times a step. The first ``MAX_WORKERS`` workers are written: less than a megabyte a
step however large the job.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_runtime.report.disk import writing
from rljob_runtime.report.jsonl import Clock, Row, RowsWriter, iter_rows, number_of

if TYPE_CHECKING:
    from rljob_runtime.offload.plan import Device
    from rljob_runtime.offload.records import DeviceResidency, MoveRecord, ProcessResidency, SwitchRecord
    from rljob_runtime.offload.states import MemorySnapshot, StateKind

MAX_WORKERS = 128
MAX_ERROR_CHARS = 500


class SwitchesWriter(RowsWriter):
    """Appends rows to ``switches.jsonl``; the caller drops what is run again first."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        """Open the file for appending.

        Raises:
            RuntimeFault: it cannot be opened.
        """
        super().__init__(path, clock=clock)
        self._kept: set[str] = set()
        self._left_out: set[str] = set()

    @property
    def left_out(self) -> int:
        """Workers that are not written, for there are too many."""
        return len(self._left_out)

    def start(self, step: int, at_s: float) -> None:
        """Whatever was on the devices is not there any more.

        Raises:
            RuntimeFault: the file cannot be written.
        """
        self._lines.write({"row": "start", "step": step, "at_s": round(at_s, 6)})

    def resident(self, step: int, at_s: float, residency: Sequence[DeviceResidency]) -> None:
        """What is on the devices at ``at_s``, instead of all that was known.

        Raises:
            RuntimeFault: the file cannot be written.
        """
        self.start(step, at_s)
        devices: dict[str, list[Device]] = {}
        processes: dict[str, ProcessResidency] = {}
        for on in residency:
            for process in on.processes:
                devices.setdefault(process.worker, []).append(on.device)
                processes[process.worker] = process
        for worker, process in processes.items():
            if not self._is_kept(worker):
                continue
            self._lines.write(
                {
                    "row": "resident",
                    "step": step,
                    "at_s": round(at_s, 6),
                    "client": process.client,
                    "worker": worker,
                    "devices": [list(device) for device in devices[worker]],
                    "states": {kind.value: where.value for kind, where in process.states.items()},
                    "bytes": process.num_bytes,
                }
            )

    def switched(self, step: int, zero_s: float, record: SwitchRecord) -> None:
        """All moves of a switch; ``zero_s`` is the clock's reading when the run was first started.

        Raises:
            RuntimeFault: the file cannot be written.
        """
        for move in record.moves:
            if self._is_kept(move.worker):
                self._lines.write(_move_row(step, zero_s, record, move))

    def _is_kept(self, worker: str) -> bool:
        if worker not in self._kept:
            (self._kept if len(self._kept) < MAX_WORKERS else self._left_out).add(worker)
        return worker in self._kept


def _move_row(step: int, zero_s: float, record: SwitchRecord, move: MoveRecord) -> Row:
    row: Row = {
        "row": "move",
        "step": step,
        "client": move.client,
        "worker": move.worker,
        "devices": [list(device) for device in move.devices],
        "direction": move.direction.value,
        "kinds": [kind.value for kind in move.kinds],
        "start_s": round(move.started_s - zero_s, 6),
        "end_s": round(move.ended_s - zero_s, 6),
        "what": record.what,
        "waited_s": round(record.waited_s, 6),
        "residence": move.residence.value,
    }
    if move.report is not None:
        row["elapsed_s"] = round(move.report.elapsed_s, 6)
        row["copied_bytes"] = _by_kind(move.report.copied_bytes)
        row["freed_bytes"] = _by_kind(move.report.freed_bytes)
        row["before"] = _memory(move.report.before)
        row["after"] = _memory(move.report.after)
    if move.error:
        row["error"] = move.error[:MAX_ERROR_CHARS]
    return row


def _by_kind(sizes: Mapping[StateKind, int]) -> dict[str, int]:
    return {kind.value: num_bytes for kind, num_bytes in sizes.items() if num_bytes}


def _memory(memory: MemorySnapshot) -> dict[str, int]:
    return {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "peak": memory.peak_bytes,
        "host_rss": memory.host_rss_bytes,
        "pinned": memory.pinned_bytes,
    }


def drop_switches_after(path: Path, step: int) -> tuple[float, bool]:
    """Drop the rows of steps above ``step``, which are run again; row by row, for the file of a long run is large.

    The file is replaced as a whole, so that a crash leaves the old or the new one.

    Returns:
        The last time in any row, in seconds, 0 without one; and whether rows are left.

    Raises:
        RuntimeFault: the file is malformed or cannot be written.
    """
    if not path.exists():
        return 0.0, False
    last_s, left = 0.0, False
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path, "the rows kept on resume"):
        try:
            with temporary.open("w", encoding="utf-8") as out:
                for row in iter_rows(path):
                    last_s = max(last_s, *(t for key in ("at_s", "end_s") if math.isfinite(t := number_of(row, key))), 0.0)
                    if number_of(row, "step") <= step:
                        out.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
                        left = True
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return last_s, left
