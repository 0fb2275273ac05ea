"""The table of peers as a picture: each comparison's median and range on one axis."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import peers

NAME = "peers.svg"
FAVORABLE, UNFAVORABLE = "tab:blue", "tab:orange"
ROW_INCHES = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One comparison."""

    label: str
    median: float
    low: float
    high: float


def bars(rows: Sequence[peers.Row]) -> list[Bar]:
    """In the order of the table."""
    return [Bar(label=row.label, median=statistics.median(row.ratios), low=min(row.ratios), high=max(row.ratios)) for row in rows]


def draw(folder: Path) -> None:
    """Write the picture of the results in ``folder`` beside them; without a comparison there is none."""
    found = bars([row for _, _, row in peers.rows(folder)])
    if not found:
        (folder / NAME).unlink(missing_ok=True)
        return
    import matplotlib as mpl

    with mpl.rc_context({"svg.hashsalt": "rljob", "svg.fonttype": "none"}):  # the same picture of the same results
        _picture(found, folder / NAME)


def _picture(found: Sequence[Bar], file: Path) -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

    figure = Figure(figsize=(9, 1 + ROW_INCHES * len(found)), layout="constrained")
    axes = figure.add_subplot()
    for place, bar in enumerate(found):
        color = FAVORABLE if bar.median >= 1 else UNFAVORABLE
        axes.plot([bar.low, bar.high], [place, place], color=color, linewidth=2, solid_capstyle="butt")
        axes.plot([bar.median], [place], color=color, marker="o", markersize=5)
        axes.annotate(f"{bar.median:.2f}", (bar.high, place), xytext=(6, 0), textcoords="offset points", va="center", fontsize="x-small")
    axes.axvline(1, color="black", linewidth=0.8)
    low, high = min(bar.low for bar in found) / 1.1, max(bar.high for bar in found) * 1.4
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high), xlabel="RLJob's multiple of the peer's speed: median and range of pairs")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(found)), [bar.label for bar in found], fontsize="small")
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.grid(visible=True, axis="x", linewidth=0.4)
    FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})
