"""``rljob timeline``: what every worker did when, as words, as a trace, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rljob_runtime.commands.show_run import open_run
from rljob_runtime.errors import SetupError
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.text import format_percent, format_seconds
from rljob_runtime.report.timeline import Timeline, read

if TYPE_CHECKING:
    from rich.console import Console


def steps_of(text: str | None) -> tuple[int, int] | None:
    """``5-9`` or ``5`` as first and last step.

    Raises:
        SetupError: it is neither.
    """
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
        raise SetupError(f"--steps {text}: give a step or a range of steps, for example 12 or 5-9")
    return int(first), int(last or first)


def show(path: Path, steps: str | None, perfetto: Path | None, html: Path | None, console: Console) -> None:
    """Write what is asked for, and print where the time of every worker went.

    Raises:
        SetupError: no run, no such steps.
        RuntimeFault: a file is malformed or cannot be written.
    """
    timeline = read(open_run(path), steps_of(steps))
    if perfetto is not None:
        from rljob_runtime.report.perfetto import trace

        replace_text(perfetto, trace(timeline), "the trace")
    if html is not None:
        from rljob_runtime.report.timeline_page import page

        replace_text(html, page(timeline), "the page")
    print_shares(timeline, console)
    for written, how in ((perfetto, "open it at https://ui.perfetto.dev"), (html, "open it in a browser")):
        if written is not None:
            console.print(f"wrote {written}: {how}", style="grey62", markup=False)


def print_shares(timeline: Timeline, console: Console) -> None:
    """By worker the share of each phase, and the longest wait with its cause."""
    from rich.table import Table
    from rich.text import Text

    length_s = timeline.end_s - timeline.start_s
    console.print(
        f"steps {timeline.first_step} to {timeline.last_step} of {timeline.steps_in_run}, {format_seconds(length_s)}", markup=False
    )
    table = Table(box=None, pad_edge=False)
    for title in ("worker", "phases", "longest wait"):
        table.add_column(title, overflow="fold", no_wrap=title == "worker")
    waited = timeline.waited_s()
    for lane in timeline.lanes:
        seconds: dict[str, float] = {}
        for span in lane.spans:
            seconds[span.phase] = seconds.get(span.phase, 0.0) + span.end_s - span.start_s
        shares = ", ".join(
            f"{phase} {format_percent(s / length_s)}"
            for phase, s in sorted(seconds.items(), key=lambda item: -item[1])
            if s / length_s >= 0.005
        )
        causes = waited.get(lane.name, {})
        cause = max(causes, key=lambda name: causes[name], default=None)
        words = f"{format_seconds(causes[cause])} {cause}" if cause is not None else ""
        table.add_row(Text(lane.name), Text(shares), Text(words))
    console.print(table)
