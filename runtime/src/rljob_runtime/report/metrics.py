"""``metrics.jsonl``: one JSON object a step, flat, in time order.

A line is ``{"step": 12, "version": 12, "wall_s": 3.41, "reward/mean": 0.71, ...}``. ``wall_s`` counts seconds since the run was
first started, lost work included. A metric that is not finite is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rljob_runtime.records import StepRecord
from rljob_runtime.report.jsonl import Clock, Row, RowsWriter, finite_or_none, number_of, read_rows
from rljob_runtime.report.names import require_registered

_PLAIN_KEYS = frozenset({"step", "version", "wall_s"})


class MetricsWriter(RowsWriter):
    """Appends step records to ``metrics.jsonl``; the caller truncates the file first when it resumes."""

    def __init__(self, path: Path, *, clock: Clock, flush_every_s: float = 1.0) -> None:
        """Open the file for appending.

        Raises:
            RuntimeFault: it cannot be opened.
        """
        super().__init__(path, clock=clock, flush_every_s=flush_every_s)
        self._known: set[str] = set()

    def write(self, record: StepRecord, wall_s: float) -> None:
        """Append one step.

        Raises:
            UnknownMetricError: a name is not registered.
            RuntimeFault: the file cannot be written.
        """
        new = record.metrics.keys() - self._known
        require_registered(sorted(new))
        self._known |= new
        row: Row = {"step": record.step, "version": record.version, "wall_s": round(wall_s, 6)}
        for name, value in record.metrics.items():
            row[name] = finite_or_none(float(value))
        self._lines.write(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsTable:
    """All steps of a run by column, for the report and the summary; all sequences have one entry a step."""

    steps: tuple[int, ...]
    versions: tuple[int, ...]
    wall_s: tuple[float, ...]
    columns: Mapping[str, tuple[float, ...]]
    """NaN where a step lacks the metric or it was not finite."""

    def column(self, name: str) -> tuple[float, ...]:
        """The values of one metric; empty where no step has it."""
        return self.columns.get(name, ())

    def total(self, name: str) -> float:
        """Sum of a metric over the steps that have it; 0 where none has."""
        return math.fsum(v for v in self.column(name) if math.isfinite(v))


def record_of(row: Row) -> StepRecord:
    """The step of one row of ``metrics.jsonl``."""
    metrics = {key: number_of(row, key) for key in row if "/" in key}
    return StepRecord(step=int(number_of(row, "step")), version=int(number_of(row, "version")), metrics=metrics)


def table_of(rows: Iterable[Row]) -> MetricsTable:
    """Turn the rows of ``metrics.jsonl`` into columns."""
    kept = list(rows)
    names = sorted({key for row in kept for key in row} - _PLAIN_KEYS)
    return MetricsTable(
        steps=tuple(int(number_of(row, "step")) for row in kept),
        versions=tuple(int(number_of(row, "version")) for row in kept),
        wall_s=tuple(number_of(row, "wall_s") for row in kept),
        columns={name: tuple(number_of(row, name) for row in kept) for name in names},
    )


def load_metrics(path: Path) -> MetricsTable:
    """Read ``metrics.jsonl``; a missing file is a run without steps.

    Raises:
        RuntimeFault: the file is malformed.
    """
    return table_of(read_rows(path))
