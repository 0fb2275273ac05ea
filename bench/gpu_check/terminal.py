"""Progress and results for people, with rich where it is installed and as plain lines otherwise; and as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from bench.gpu_check.lines import Line, Verdict

COLUMNS = ("", "check", "what", "value", "beside", "share", "bound")
COLORS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.SKIP: "yellow"}


def row(line: Line) -> tuple[str, ...]:
    """Cells as in :data:`COLUMNS`."""
    verdict = str(line.verdict)
    if line.skipped or line.failed:
        return verdict, line.check, line.skipped or line.failed, "", "", "", ""
    beside = f"{number(line.limit)} {line.unit}, {line.limit_name}" if line.limit is not None else ""
    shown = f"{line.compared:.0%}" if line.limit is not None and line.compared is not None else ""
    what = f"{line.what} ({line.note})" if line.note else line.what
    return verdict, line.check, what, f"{number(line.value)} {line.unit}", beside, shown, line.bound_text


def number(value: float) -> str:
    """Three significant digits, all of a large whole number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def has_rich() -> bool:
    """Whether rich can be used."""
    return importlib.util.find_spec("rich") is not None


@contextmanager
def progress(total: int, out: TextIO) -> Iterator[Callable[[str], None]]:
    """A bar over checks; the function that is yielded names the check that begins."""
    if not has_rich():
        counter = iter(range(1, total + 1))

        def say(name: str) -> None:
            out.write(f"[{next(counter)}/{total}] {name}\n")
            out.flush()

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=out), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = iter(range(total))

        def show(name: str) -> None:
            bar.update(task, description=name, completed=next(begun))

        yield show


def table(lines: Sequence[Line], out: TextIO) -> None:
    """All lines."""
    rows = [row(line) for line in lines]
    if not has_rich():
        widths = [max(len(cells[i]) for cells in (COLUMNS, *rows)) for i in range(len(COLUMNS))]
        for cells in (COLUMNS, *rows):
            out.write("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        shown.add_column(name, overflow="fold", justify="right" if name in ("value", "share") else "left")
    for line, cells in zip(lines, rows, strict=True):
        shown.add_row(Text(cells[0], style=COLORS[line.verdict]), *(Text(cell) for cell in cells[1:]))
    Console(file=out, width=None if out.isatty() else 160).print(shown)


def write_json(path: Path, facts: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """The lines with what was measured on.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps({**facts, "lines": [line.as_document() for line in lines]}, indent=1) + "\n", encoding="utf-8")


def markdown(lines: Sequence[Line]) -> str:
    """The same table for an issue or a page."""
    rows = [" | ".join(cells) for cells in (COLUMNS, ["---"] * len(COLUMNS), *(row(line) for line in lines))]
    return "".join(f"| {cells} |\n" for cells in rows)


def say(text: str) -> None:
    """One line of the output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
