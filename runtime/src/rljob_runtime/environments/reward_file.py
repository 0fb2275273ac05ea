"""What an agent program writes to ``RLJOB_REWARD_FILE``."""

from __future__ import annotations

import json
import math
from typing import TypeGuard


def parse_reward(text: str) -> tuple[float, dict[str, float]]:
    """Reward and metrics of a reward file.

    Raises:
        ValueError: it is neither a number nor an object with one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no JSON; write a number, or an object with reward") from error
    metrics = value.get("metrics", {}) if isinstance(value, dict) else {}
    value = value.get("reward") if isinstance(value, dict) else value
    if isinstance(value, bool) or not _is_finite(value):
        raise ValueError("reward must be a finite number")
    if not isinstance(metrics, dict) or not all(map(_is_finite, metrics.values())):
        raise ValueError("metrics must be finite numbers by name")
    return float(value), {str(name): float(metric) for name, metric in metrics.items()}


def _is_finite(value: object) -> TypeGuard[int | float]:
    """Whether it is a number that a float can hold; Python's own integers may have more digits."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False
