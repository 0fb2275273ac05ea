"""Bytes and counts as text, and back."""

from __future__ import annotations

GIB = 2**30
MIB = 2**20


def show_bytes(num_bytes: int) -> str:
    """``28.37 GiB``, ``512.0 MiB``, ``3.2 KiB``."""
    for unit, scale, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", 1024, 1)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.{digits}f} {unit}"
    return f"{num_bytes} B"


def show_count(count: int) -> str:
    """A number with three significant digits: ``7.62B``, ``464M``, ``820``; parameters are counted so."""
    for suffix, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= scale:
            value = count / scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}{suffix}"
    return str(count)


def ceil_div(value: int, divisor: int) -> int:
    """``value / divisor``, rounded up."""
    return -(-value // divisor)
