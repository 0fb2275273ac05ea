"""What became of a fault; and of all of them, by kind."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

RECOVERED, FAILED, WRONG = "recovered", "failed with the true cause", "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One fault."""

    layer: str
    kind: str
    result: str
    """``RECOVERED``, ``FAILED`` or ``WRONG``."""
    recovery_s: float | None = None
    """From the fault to the work that follows it; None where nothing follows."""
    detail: str = ""
    """What was wrong, and how to have it again."""


def table(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """One row for every layer and kind, in the order of their first fault."""
    rows = []
    for layer, kind in dict.fromkeys((outcome.layer, outcome.kind) for outcome in outcomes):
        found = [outcome for outcome in outcomes if (outcome.layer, outcome.kind) == (layer, kind)]
        took_s = [outcome.recovery_s for outcome in found if outcome.recovery_s is not None and outcome.result == RECOVERED]
        counts = {result: sum(outcome.result == result for outcome in found) for result in (RECOVERED, FAILED, WRONG)}
        rows.append({"layer": layer, "kind": kind, "faults": len(found), **counts, **quantiles(took_s)})
    return rows


def quantiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """Median and 99th percentile; of one value that value, of none None."""
    if len(seconds) < 2:
        value = round(seconds[0], 3) if seconds else None
        return {"p50_s": value, "p99_s": value}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_s": round(cuts[49], 3), "p99_s": round(cuts[98], 3)}
