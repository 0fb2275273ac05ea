"""Success over steps of runs, from their metrics, and whether they learned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bench.lake import jobs

FIRST_STEPS, LAST_STEPS = 5, 10
RISE_AT_LEAST = 0.3
"""Between the mean success of the first and of the last steps: what counts as having learned."""
FIELDS = (
    "episode/success",
    "validation/pass_rate",
    "validation/version",
    "episode/turns_mean",
    "staleness/max",
    "time/step_s",
    "time/generate_s",
    "time/train_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    job: str
    """One of ``jobs.JOBS``."""
    fingerprint: str
    """Of its job as it was run."""
    seed: int
    training_s: float
    """Wall time of all steps, validation included, without start-up."""
    metrics: Mapping[str, Sequence[float | None]]
    """Of each step, by name; validation only where there was one."""

    @staticmethod
    def of_row(row: Mapping[str, Any]) -> Run:
        """The run that ``row`` was made of."""
        return Run(**{field.name: row[field.name] for field in fields(Run)})

    def row(self) -> dict[str, Any]:
        return asdict(self) | {"first": self.first, "last": self.last, "validations": self.validations, "learned": self.learned}

    @property
    def success(self) -> Sequence[float]:
        """Share of a step's episodes that reached the goal."""
        return [value for value in self.metrics["episode/success"] if value is not None]

    @property
    def first(self) -> float:
        return float(np.mean(self.success[:FIRST_STEPS]))

    @property
    def last(self) -> float:
        return float(np.mean(self.success[-LAST_STEPS:]))

    @property
    def validations(self) -> list[tuple[int, float]]:
        """(version, success) on the same maps under one version after another."""
        found = zip(self.metrics["validation/version"], self.metrics["validation/pass_rate"], strict=True)
        return [(int(version), success) for version, success in found if version is not None and success is not None]

    @property
    def learned(self) -> bool:
        return self.last - self.first >= RISE_AT_LEAST


def read(run_folder: Path, *, job: str, seed: int) -> Run:
    """Of a finished run's folder."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((run_folder / "summary.json").read_text())
    return Run(
        job=job,
        fingerprint=jobs.fingerprint(job),
        seed=seed,
        training_s=summary["training_s"],
        metrics={name: [row.get(name) for row in rows] for name in FIELDS},
    )


def by_job(runs: Sequence[Run]) -> list[tuple[str, list[Run]]]:
    """Runs of one job after another, in the order in which they come."""
    return [(job, list(found)) for job, found in groupby(runs, lambda run: run.job)]


def headline(runs: Sequence[Run]) -> str:
    """How many learned, and from where to where."""
    risen = ", ".join(f"{_span([run.last for run in found])} ({job})" for job, found in by_job(runs))
    return (
        f"{sum(run.learned for run in runs)} of {len(runs)} runs learn: success from {_span([run.first for run in runs])} in the first "
        f"{FIRST_STEPS} steps to {risen} in the last {LAST_STEPS}, within {max(run.training_s for run in runs):.0f} s"
    )


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"
