"""A comparison in words and figures, the same in the terminal and on the page."""

from __future__ import annotations

from rljob_runtime.report.comparison import Cell, Comparison
from rljob_runtime.report.significance import SIGNIFICANT, TEST
from rljob_runtime.report.text import format_value


def cell_text(cell: Cell) -> str:
    """``0.81 ± 0.02``."""
    if not cell.values:
        return "-"
    return format_value(cell.mean) + (f" ± {format_value(cell.spread)}" if cell.spread is not None else "")


def difference_text(cell: Cell) -> str:
    """``+0.12 [0.08, 0.15], p 0.03``, against the first variant."""
    d = cell.against_first
    if d is None or cell.p is None:
        return ""
    interval = "" if d.low is None or d.high is None else f" [{format_value(d.low)}, {format_value(d.high)}]"
    return f"{'+' if d.mean >= 0 else ''}{format_value(d.mean)}{interval}, p {cell.p:.2g}{' *' if cell.is_significant else ''}"


def significance_note(comparison: Comparison) -> str:
    """Which test, and what it cannot say with so few seeds."""
    found = [cell.against_first for _, cells in comparison.rows for cell in cells if cell.against_first is not None]
    if not found:
        return "One variant: there is nothing to test."
    words = f"Below a value: difference to the first variant with its 95 % bootstrap interval over seeds, and p of a {TEST}. "
    words += f"* marks p below {SIGNIFICANT}."
    if any(not d.can_be_significant for d in found):
        least = max(d.smallest_p for d in found)
        words += f" With so few seeds no difference can reach that (smallest possible p {least:.2g}): 4 seeds on both sides are the fewest."
    return words
