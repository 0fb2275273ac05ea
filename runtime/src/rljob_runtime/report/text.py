"""Numbers as people read them, and sparklines; shared by the terminal, the plain lines and the HTML report."""

from __future__ import annotations

import math
from collections.abc import Sequence

SPARK_LEVELS = "▁▂▃▄▅▆▇█"


def format_count(value: float) -> str:
    """``9.1k``, ``12M``, ``532``, ``3.6``: at most four characters before the suffix, ``-`` when not finite."""
    if not math.isfinite(value):
        return "-"
    for limit, divisor, suffix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k"), (1e3, 1e3, "k")):
        # 0.9995 keeps 999,700 from reading 1000k
        if abs(value) >= limit * 0.9995:
            scaled = value / divisor
            return f"{scaled:.0f}{suffix}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{suffix}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 99.95 else f"{value:.1f}"


def format_tokens(value: float) -> str:
    """A mean length: ``3.6``, ``11.0``, ``532``, ``9.1k``; always one decimal below 100, so that lines stay aligned."""
    return f"{value:.1f}" if abs(value) < 99.95 else format_count(value)


def format_value(value: float) -> str:
    """A loss or a norm in at most nine characters: ``0.0123``, ``12.5``, ``3.1e-06``, ``-`` when not finite."""
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.1e}"


def format_seconds(value_s: float) -> str:
    """A duration: ``0.11 s``, ``8.1 s``, ``42 s``, ``12:05``, ``1:02:03``; ``-`` when not finite."""
    if not math.isfinite(value_s):
        return "-"
    if value_s < 1:
        return f"{value_s:.2f} s"
    if value_s < 10:
        return f"{value_s:.1f} s"
    if value_s < 99.5:
        return f"{value_s:.0f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_bytes(value_bytes: float) -> str:
    """Binary units: ``512 B``, ``1.5 MiB``, ``24 GiB``."""
    amount = float(value_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" or abs(amount) >= 99.95 else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def format_percent(fraction: float) -> str:
    """``70%``; ``-`` when not finite."""
    return f"{fraction * 100:.0f}%" if math.isfinite(fraction) else "-"


def bucket_means(values: Sequence[float], buckets: int) -> list[float]:
    """Shrink ``values`` to at most ``buckets`` means of neighbors; values that are not finite are left out.

    A bucket without any finite value is NaN. Order is kept, and every value counts in exactly one bucket.
    """
    count = len(values)
    if count <= buckets:
        return list(values)
    means: list[float] = []
    for index in range(buckets):
        part = [v for v in values[index * count // buckets : (index + 1) * count // buckets] if math.isfinite(v)]
        means.append(sum(part) / len(part) if part else math.nan)
    return means


def sparkline(values: Sequence[float], width: int) -> str:
    """One character a bucket, scaled between the lowest and highest bucket; a blank where nothing is finite."""
    means = bucket_means(values, width)
    finite = [m for m in means if math.isfinite(m)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(SPARK_LEVELS) - 1

    def level(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return SPARK_LEVELS[round((value - low) / span * top) if span > 0 else 0]

    return "".join(level(m) for m in means)
