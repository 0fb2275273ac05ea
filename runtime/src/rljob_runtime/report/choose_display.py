"""Which display a run gets: the live panel on a terminal that can show it, plain lines everywhere else."""

from __future__ import annotations

from typing import TextIO

from rljob_runtime.report.display import Display, PlainDisplay
from rljob_runtime.report.jsonl import Clock


def make_display(stream: TextIO, *, clock: Clock, plain_every_s: float = 5.0) -> Display:
    """Live on a terminal that can show it, plain lines otherwise."""
    from rich.console import Console  # rich is only loaded once a run begins

    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and "utf" in console.encoding.lower():
        from rljob_runtime.report.live import LiveDisplay

        return LiveDisplay(console, clock=clock)
    return PlainDisplay(stream, clock=clock, every_s=plain_every_s)
