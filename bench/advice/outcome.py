"""Applying advice to a manifest, and predicted beside measured change."""

from __future__ import annotations

import copy
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.measure import machine_text
from bench.pairs import spread
from rljob_runtime.report.faster import Change

RATIO = re.compile(r"overlap\.asyncGenerationRatio (\d+(?:\.\d+)?)")
"""Advice that a field of the spec follows from; other numbers of devices have a placement as their own."""


def first_applicable(found: Sequence[Change]) -> Change | None:
    """The best advice that :func:`applied` can follow."""
    return next((change for change in found if RATIO.fullmatch(change.what)), None)


def applied(manifest: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The manifest with the advice followed.

    Raises:
        ValueError: The advice is not about one field.
    """
    ratio = RATIO.fullmatch(change.what)
    if ratio is None:
        raise ValueError(f"advice {change.what!r}: expected 'overlap.asyncGenerationRatio N'; follow it by hand and run both jobs")
    changed: dict[str, Any] = copy.deepcopy(dict(manifest))
    number = float(ratio[1])
    changed["spec"].setdefault("overlap", {})["asyncGenerationRatio"] = int(number) if number.is_integer() else number
    return changed


def values(change: Change, pairs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Predicted and measured speedups by pair.

    Args:
        change: the advice after the first run.
        pairs: ``before_s`` and ``after_s`` of a typical step, and ``predicted_s`` and ``contended_s`` from the phases of the run before.
    """
    measured = [pair["before_s"] / pair["after_s"] for pair in pairs]
    predicted = [pair["before_s"] / pair["predicted_s"] for pair in pairs]
    contended = [pair["before_s"] / pair["contended_s"] for pair in pairs]
    low, high = statistics.median(contended), statistics.median(predicted)
    headline = (
        f"{change.what}: predicted {low:.2f} (all cores used by both phases) to {high:.2f} times as fast, "
        f"measured {statistics.median(measured):.2f}"
    )
    return {
        "advice": change.what,
        "pairs": [dict(pair) for pair in pairs],
        "measured": measured,
        "predicted": predicted,
        "contended": contended,
        "headline": headline,
    }


def markdown(found: Mapping[str, Any]) -> str:
    """The whole report."""
    lines = [
        "# Advice of the report, followed",
        "",
        f"Written by `python -m bench.advice` on {found['machine']['measured_at']}: {machine_text(found['machine'])}; load "
        f"{found['load_before']:.1f} before. The quickstart, {found['steps']} steps, then with the best advice of its own phases; "
        "runs alternate.",
        "",
        f"{found['headline']}.",
        "",
        "| pair | step, s | predicted, s | predicted with cores shared, s | measured, s | times as fast |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for place, (pair, times) in enumerate(zip(found["pairs"], found["measured"], strict=True), start=1):
        cells = " | ".join(f"{pair[key]:.3f}" for key in ("before_s", "predicted_s", "contended_s", "after_s"))
        lines.append(f"| {place} | {cells} | {times:.2f} |")
    return "\n".join([*lines, "", f"Measured: {spread(found['measured'])}; predicted: {spread(found['predicted'])}.", ""])
