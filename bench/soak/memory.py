"""What a process holds, read from the kernel; and the trend of a series of such readings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
KIB = 1024
_FIELDS = {"Rss": "rss_bytes", "Pss": "pss_bytes", "Pss_File": "file_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Of one process at one moment, in bytes."""

    rss_bytes: int
    pss_bytes: int
    """Resident memory in which a page counts in equal parts for all who map it."""
    held_bytes: int
    """PSS without pages of files, which the kernel drops and fetches again as it likes: what grows if something leaks."""


def read(pid: int, proc: Path = Path("/proc")) -> Memory | None:
    """Memory of a process and nothing of its children; None where it is gone."""
    try:
        text = (proc / str(pid) / "smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = dict.fromkeys(_FIELDS.values(), 0)
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key in _FIELDS:
            found[_FIELDS[key]] = int(value.split()[0]) * KIB
    if not found["pss_bytes"]:
        return None  # a zombie maps nothing
    return Memory(
        rss_bytes=found["rss_bytes"], pss_bytes=found["pss_bytes"], held_bytes=max(0, found["pss_bytes"] - found["file_bytes"])
    )  # fmt: skip


def slope(seconds: Sequence[float], values: Sequence[float], max_points: int = 200) -> float:
    """Median of the slopes between all pairs of points (Theil-Sen): a few outliers do not bend it.

    Args:
        seconds: of each point.
        values: of each point.
        max_points: evenly taken from more.

    Returns:
        Growth per second.

    Raises:
        ValueError: fewer than two points.
    """
    if len(seconds) < 2:
        raise ValueError(f"a slope needs two points, found {len(seconds)}")
    every = max(1, len(seconds) // max_points)
    points = list(zip(seconds, values, strict=True))[::every]
    return statistics.median(
        (second[1] - first[1]) / (second[0] - first[0]) for at, first in enumerate(points) for second in points[at + 1 :]
    )  # fmt: skip
