"""Several runs side by side: which are the same job with other seeds, in which fields the jobs differ, and by how much the results. Pure.

::

    run folders ── spec.yaml, metrics.jsonl ──> Run ── spec without seed and name ──> Variant (runs of one job) ──> Comparison
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.significance import CONFIDENCE, SIGNIFICANT, TEST, Difference, difference, holm
from rljob_runtime.report.summary import LAST_STEPS

SEED = "spec.seed"
NAME = "metadata.name"
ABSENT = "-"
"""Stands for a field that a job does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    label: str
    """What the user called it: its folder."""
    manifest: Mapping[str, Any]
    """Its resolved spec."""
    table: MetricsTable
    status: str
    """Of summary.json, or ``not ended``."""

    @property
    def seed(self) -> int:
        """Of its spec."""
        return int(self.manifest["spec"].get("seed", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Runs whose jobs differ in seed and name alone."""

    label: str
    fields: Mapping[str, str]
    """What sets it apart, by path; values as JSON, ``-`` where it has no such field."""
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure of a run that is compared."""

    name: str
    """Stable, for ``--json``."""
    title: str
    of: Callable[[MetricsTable], float]
    """NaN where the run does not have it."""
    more_is_better: bool | None
    """None: neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A measure of one variant."""

    values: tuple[float, ...]
    """Of its runs that have it."""
    against_first: Difference | None
    """None for the first variant, and where a side has no value."""
    p: float | None
    """Corrected; None where there is no difference to test."""

    @property
    def mean(self) -> float:
        """Mean over the runs; NaN without any."""
        return fmean(self.values) if self.values else math.nan

    @property
    def spread(self) -> float | None:
        """Standard deviation over the runs (n - 1); None with fewer than two."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def is_significant(self) -> bool:
        """Whether it differs from the first variant by more than seeds explain."""
        return self.p is not None and self.p < SIGNIFICANT


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All of it."""

    variants: tuple[Variant, ...]
    """The first is the baseline."""
    differences: Mapping[str, tuple[str, ...]]
    """Fields that are not the same in all variants, with the value of each."""
    rows: tuple[tuple[Measure, tuple[Cell, ...]], ...]
    """Measures that some run has, with a cell for each variant."""


def _last(name: str) -> Callable[[MetricsTable], float]:
    def mean(table: MetricsTable) -> float:
        values = [v for v in table.column(name)[-LAST_STEPS:] if math.isfinite(v)]
        return fmean(values) if values else math.nan

    return mean


def _last_finite(name: str) -> Callable[[MetricsTable], float]:
    return lambda table: next((v for v in reversed(table.column(name)) if math.isfinite(v)), math.nan)


def _typical(name: str) -> Callable[[MetricsTable], float]:
    """Median over the steps after the first, which is slower than the others."""

    def middle(table: MetricsTable) -> float:
        values = [v for v in table.column(name) if math.isfinite(v)]
        return median(values[1:] or values) if values else math.nan

    return middle


MEASURES = (
    Measure(name="reward", title=f"reward, last {LAST_STEPS} steps", of=_last("reward/mean"), more_is_better=True),
    Measure(name="passRate", title=f"pass rate, last {LAST_STEPS} steps", of=_last("reward/pass_rate"), more_is_better=True),
    Measure(name="validation", title="last validation", of=_last_finite("validation/mean"), more_is_better=True),
    Measure(
        name="responseTokens", title=f"response tokens, last {LAST_STEPS} steps", of=_last("response/mean_tokens"), more_is_better=None
    ),
    Measure(name="stepSeconds", title="seconds per step", of=_typical("time/step_s"), more_is_better=False),
    Measure(name="tokensPerSecond", title="tokens per second", of=_typical("rollout/tokens_per_s"), more_is_better=True),
)


def compare(runs: Sequence[Run]) -> Comparison:
    """Put runs, one or more, side by side; the job of the first is the baseline."""
    specs = [flat(run.manifest) for run in runs]
    keys = [json.dumps({path: value for path, value in spec.items() if path not in (SEED, NAME)}, sort_keys=True) for spec in specs]
    order = list(dict.fromkeys(keys))
    firsts = [specs[keys.index(key)] for key in order]
    paths = sorted({path for spec in firsts for path in spec} - {SEED, NAME})
    differing = {path: values for path in paths if len(set(values := tuple(spec.get(path, ABSENT) for spec in firsts))) > 1}
    shared = _shared_folder([run.label for run in runs])
    variants = []
    for index, key in enumerate(order):
        members = tuple(run for run, own in zip(runs, keys, strict=True) if own == key)
        fields = {path: values[index] for path, values in differing.items()}
        variants.append(Variant(label=_label(members, fields).removeprefix(shared), fields=fields, runs=members))
    rows = tuple(row for measure in MEASURES if (row := _row(measure, variants)) is not None)
    return Comparison(variants=tuple(variants), differences=differing, rows=rows)


def _shared_folder(labels: Sequence[str]) -> str:
    """The folder that all runs are in, with its slash, where it is longer than one name: legends and columns do not repeat it."""
    folders = {label.rpartition("/")[0] for label in labels}
    folder = next(iter(folders))
    return f"{folder}/" if len(folders) == 1 and "/" in folder else ""


def _label(runs: Sequence[Run], fields: Mapping[str, str]) -> str:
    """The last parts of one or two differing paths with their values, or the first run's name where there are more or none."""
    words = [f"{path.rpartition('.')[2]} {value}" for path, value in fields.items()]
    return ", ".join(words) if words and len(words) <= 2 else runs[0].label


def _row(measure: Measure, variants: Sequence[Variant]) -> tuple[Measure, tuple[Cell, ...]] | None:
    values = [tuple(v for run in variant.runs if math.isfinite(v := measure.of(run.table))) for variant in variants]
    if not any(values):
        return None
    found = [difference(values[0], own) if index and values[0] and own else None for index, own in enumerate(values)]
    corrected = iter(holm([d.p for d in found if d is not None]))
    cells = tuple(Cell(values=own, against_first=d, p=None if d is None else next(corrected)) for own, d in zip(values, found, strict=True))
    return measure, cells


def flat(value: object, path: str = "") -> dict[str, str]:
    """Leaves of a manifest by path, as JSON; entries of a list that have a name are found by it, so that their order says nothing."""
    if isinstance(value, Mapping) and value:
        return _merged(flat(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items())
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        return _merged(flat({k: v for k, v in item.items() if k != "name"}, f"{path}[{item['name']}]") for item in value)
    return {path: json.dumps(value)}


def _merged(parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    return {path: value for part in parts for path, value in part.items()}


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The document of ``rljob compare --json``."""
    return {
        "variants": [
            {
                "label": v.label,
                "fields": {path: _value(text) for path, text in v.fields.items()},
                "runs": [{"run": r.label, "seed": r.seed, "status": r.status, "steps": len(r.table.steps)} for r in v.runs],
            }
            for v in comparison.variants
        ],
        "differences": {path: [_value(text) for text in values] for path, values in comparison.differences.items()},
        "test": {"name": TEST, "significantBelow": SIGNIFICANT, "confidence": CONFIDENCE, "baseline": comparison.variants[0].label},
        "measures": [{"name": m.name, "title": m.title, "variants": [_cell_json(cell) for cell in cells]} for m, cells in comparison.rows],
    }


def _value(text: str) -> object:
    return None if text == ABSENT else json.loads(text)


def _cell_json(cell: Cell) -> dict[str, Any]:
    found: dict[str, Any] = {"values": list(cell.values), "mean": cell.mean if cell.values else None, "standardDeviation": cell.spread}
    if (d := cell.against_first) is not None:
        found["difference"] = {
            "mean": d.mean,
            "interval": None if d.low is None else [d.low, d.high],
            "p": cell.p,
            "smallestPossibleP": d.smallest_p,
            "significant": cell.is_significant,
        }
    return found
