"""Table of examples by seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

FIELDS = ("total_steps", "reward_first", "reward_last", "validation_mean", "training_s")
"""What of a run's ``summary.json`` is kept."""
FROM_AT_MOST, TO_AT_LEAST = 0.35, 0.85
"""Mean rewards of the first 5 and the last 10 steps between which a run counts as having learned, as for the quickstart's test."""


def has_learned(run: Mapping[str, Any]) -> bool:
    """Whether the reward rose from what the model brings to what the task allows."""
    return bool(run["reward_first"]["mean"] <= FROM_AT_MOST and run["reward_last"]["mean"] >= TO_AT_LEAST)


def values(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Runs, how many of them learned, and that in words."""
    learned = sum(has_learned(run) for run in runs)
    ends = ", ".join(f"{example} {_range(runs, example)}" for example in dict.fromkeys(str(run["example"]) for run in runs))
    headline = f"{learned} of {len(runs)} runs rise from at most {FROM_AT_MOST} to at least {TO_AT_LEAST}; last rewards: {ends}"
    return {"runs": [dict(run) for run in runs], "learned": learned, "headline": headline}


def _range(runs: Sequence[Mapping[str, Any]], example: str) -> str:
    last = [run["reward_last"]["mean"] for run in runs if run["example"] == example]
    return f"{min(last):.3f} to {max(last):.3f}"


def markdown(values: Mapping[str, Any]) -> str:
    """The whole report."""
    machine = values["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        "# Examples over seeds",
        "",
        f"Written by `python -m bench.seeds` on {machine['measured_at']}: {machine['cores']} cores of {machine['processor']}, {versions}.",
        "",
        f"{values['headline']}.",
        "",
        "| example | seed | steps | reward, first steps | reward, last steps | validation at the end | training |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in values["runs"]:
        validated = "-" if run["validation_mean"] is None else f"{run['validation_mean']:.3f}"
        cells = [run["example"], run["seed"], run["total_steps"], f"{run['reward_first']['mean']:.3f}", f"{run['reward_last']['mean']:.3f}"]
        lines.append("| " + " | ".join(str(cell) for cell in (*cells, validated, f"{run['training_s']:.0f} s")) + " |")
    return "\n".join([*lines, ""])
