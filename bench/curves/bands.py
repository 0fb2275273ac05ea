"""Bands of learning curves over seeds, and whether two sides' bands overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WINDOW_STEPS = 10
"""Rewards are averaged over windows of as many steps: a step's mean over 32 prompts is noisy."""
LAST_WINDOWS = 3


def bands(curves: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Mean, least and largest reward over seeds, for each window; steps that fill no window are left out."""
    rows = np.array([_windows(curve) for curve in curves.values()])
    return {"mean": rows.mean(axis=0).tolist(), "low": rows.min(axis=0).tolist(), "high": rows.max(axis=0).tolist()}


def summarize(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """Bands of both sides, the share of windows in which they overlap, and how far the ends of the runs are apart.

    The distance of the ends is in standard errors of the difference of two means over seeds (Welch); beyond 2.3 or so, with five seeds
    each, chance alone is unlikely.
    """
    found = {side: bands(runs) for side, runs in curves.items()}
    (a, first), (b, second) = found.items()
    overlaps = [
        low <= other_high and other_low <= high
        for low, high, other_low, other_high in zip(first["low"], first["high"], second["low"], second["high"], strict=True)
    ]
    ends = {side: [float(np.mean(_windows(curve)[-LAST_WINDOWS:])) for curve in runs.values()] for side, runs in curves.items()}
    error = float(np.sqrt(sum(np.var(values, ddof=1) / len(values) for values in ends.values())))
    apart = float(np.mean(ends[a]) - np.mean(ends[b]))
    share = float(np.mean(overlaps))
    return {
        "window_steps": WINDOW_STEPS,
        "bands": found,
        "ends": ends,
        "overlap_share": share,
        "ends_apart_errors": apart / error if error > 0 else 0.0,
        "headline": f"bands of {len(ends[a])} seeds overlap in {100 * share:.0f} % of the windows, "
        f"last rewards {np.mean(ends[a]):.3f} ({a}) and {np.mean(ends[b]):.3f} ({b})",
    }


def _windows(curve: Sequence[float]) -> np.ndarray:
    whole = len(curve) // WINDOW_STEPS * WINDOW_STEPS
    return np.asarray(curve[:whole], dtype=np.float64).reshape(-1, WINDOW_STEPS).mean(axis=1)
