"""Progress and results for people, with rich where it is installed and as plain lines otherwise; and as JSON."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bench.gpu_check.lines import Line, Verdict

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("", "check", "what", "value", "beside", "share", "bound")
WIDTHS = (4, 13, None, 20, 30, 5, 14)
"""Of the columns; the one without gets the rest."""
PLAIN_WIDTHS = (4, 13, 70, 20, 30, 5, 14)
WIDTH = 160
"""Where the output is no terminal."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What people see meanwhile."""

    begin: Callable[[str], None]
    """A check begins."""
    stage: Callable[[str, str], None]
    """A check, and what it does from now on."""
    show: Callable[[Line], None]


@contextmanager
def screen(total: int, out: TextIO, err: TextIO) -> Iterator[Screen]:
    """Lines on ``out`` as they come, and how many of the checks are done on ``err``: with rich as a bar."""
    if not has_rich():
        yield _plain(total, out, err)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(file=err), transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task("", total=total)
        begun = iter(range(total))
        both = out.isatty() and bar.console.is_terminal  # what is printed through the bar stands above it
        console = bar.console if both else Console(file=out, width=None if out.isatty() else WIDTH)
        headed: list[bool] = []

        def show(line: Line) -> None:
            console.print(_cells(line, header=not headed))
            out.flush()
            headed.append(True)

        yield Screen(
            begin=lambda check: bar.update(task, description=check, completed=next(begun)),
            stage=lambda check, what: bar.update(task, description=f"{check}: {what}"),
            show=show,
        )


def _plain(total: int, out: TextIO, err: TextIO) -> Screen:
    counter = iter(range(1, total + 1))

    def write(file: TextIO, text: str) -> None:
        file.write(text + "\n")
        file.flush()

    def show(line: Line) -> None:
        cells = zip(row(line), PLAIN_WIDTHS, strict=True)
        write(out, "  ".join(cell.ljust(width) for cell, width in cells).rstrip())

    return Screen(
        begin=lambda check: write(err, f"[{next(counter)}/{total}] {check}"),
        stage=lambda check, what: write(err, f"    {check}: {what}"),
        show=show,
    )


def _cells(line: Line, *, header: bool) -> Table:
    """A row of a table whose columns are as wide in every row."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD if header else None, pad_edge=False, expand=True, show_header=header, show_edge=False)
    for name, width in zip(COLUMNS, WIDTHS, strict=True):
        is_number = name in ("value", "share")
        shown.add_column(name, overflow="fold", justify="right" if is_number else "left", width=width, ratio=None if width else 1)
    cells = row(line)
    shown.add_row(Text(cells[0], style=COLORS[line.verdict]), *(Text(cell) for cell in cells[1:]))
    return shown


def write_json(path: Path, facts: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """The lines with what was measured on; a reader finds the file before or after, never half of it.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps({**facts, "lines": [line.as_document() for line in lines]}, indent=1) + "\n"
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def markdown(lines: Sequence[Line]) -> str:
    """The same table for an issue or a page."""
    rows = [" | ".join(cells) for cells in (COLUMNS, ["---"] * len(COLUMNS), *(row(line) for line in lines))]
    return "".join(f"| {cells} |\n" for cells in rows)


def say(text: str) -> None:
    """One line of the output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
