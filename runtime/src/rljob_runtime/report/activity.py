"""``activity.jsonl``: which worker did what when, one row a phase: {worker, phase, start_s, end_s, step}, seconds since the first start.

Calls of the driver are seen where their answers are awaited; engines and environment workers, which are asked all the time, count as
busy while they have requests or actions to answer. Moves of state are in ``switches.jsonl``, the phases of whole steps in
``timeline.jsonl``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rljob_runtime.report.jsonl import Clock, RowsWriter

PHASE_OF_CALL: Mapping[str, str] = {
    "setup": "start",
    "train_step": "train",
    "compute_logprobs": "score",
    "compute_base_logprobs": "score",
    "compute_values": "score",
    "score": "score",
    "send_weights": "sync",
    "begin_update": "sync",
    "load_bucket": "sync",
    "update": "sync",
    "finish_update": "sync",
    "save_checkpoint": "checkpoint",
    "begin_checkpoint": "checkpoint",
    "damaged_files": "checkpoint",
    "load_checkpoint": "checkpoint",
    "export_hf": "checkpoint",
}
"""Calls that are work of a worker; others hand something over or ask."""
MAX_ROWS_PER_STEP = 4_096
"""Some 80 bytes each: a third of a megabyte a step, however large the job. Others of that step are left out."""


class ActivityWriter(RowsWriter):
    """Appends rows to ``activity.jsonl``; the caller drops what is run again first."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        """Open the file for appending.

        Raises:
            RuntimeFault: it cannot be opened.
        """
        super().__init__(path, clock=clock)
        self._step = -1
        self._rows = 0

    def write(self, step: int, worker: str, phase: str, spans: Sequence[tuple[float, float]]) -> None:
        """Append rows about a worker in the step under way.

        Raises:
            RuntimeFault: the file cannot be written.
        """
        if step != self._step:
            self._step, self._rows = step, 0
        for start_s, end_s in spans[: MAX_ROWS_PER_STEP - self._rows]:
            self._rows += 1
            self._lines.write({"worker": worker, "phase": phase, "start_s": round(start_s, 6), "end_s": round(end_s, 6), "step": step})
