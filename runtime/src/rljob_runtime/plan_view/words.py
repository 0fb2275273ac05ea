"""Small texts that all pictures share."""

from __future__ import annotations

from collections.abc import Iterable

from rljob_api.placement.topology import ACCELERATOR


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in their order, runs shortened: ``0-3,6``; a dash for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(start) if start == end else f"{start}-{end}" for start, end in runs) or "-"


def short_ranges(numbers: Iterable[int], limit: int) -> str:
    """Like :func:`ranges`, ascending and without repetition, cut after ``limit`` characters."""
    return clip(ranges(sorted(set(numbers))), limit)


def clip(text: str, limit: int) -> str:
    """At most ``limit`` characters; an ellipsis stands for what is missing."""
    return text if len(text) <= limit else text[: max(limit - 1, 0)] + "…"


def count(number: int, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``3 processes``, ``1,024 devices``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def listing(names: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *head, last = list(names) or [""]
    return f"{', '.join(head)} and {last}" if head else last


def units(kind: str | None, places: tuple[int, ...]) -> str:
    """What a process uses on its node: ``device 0``, ``devices 0-3``, ``Franka 1``, ``CPU``."""
    if kind is None:
        return "CPU"
    name = "device" if kind == ACCELERATOR else kind
    return f"{name if len(places) == 1 else name + 's'} {short_ranges(places, 60)}"
