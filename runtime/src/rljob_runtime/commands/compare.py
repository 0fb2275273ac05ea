"""``rljob compare``: runs from their folders, side by side in the terminal, as a page, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rljob_api.errors import counted
from rljob_runtime.commands.files import read_text
from rljob_runtime.commands.show_run import open_run
from rljob_runtime.errors import SetupError
from rljob_runtime.report.comparison import Comparison, Run, compare
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.metrics import load_metrics
from rljob_runtime.report.summary import load_summary

if TYPE_CHECKING:
    from rich.console import Console

NOT_ENDED = "not ended"


def load(paths: Iterable[Path]) -> Comparison:
    """Compare the runs in some folders, in the order of the arguments; the first is the baseline.

    Raises:
        RuntimeFault: one is no run or holds a malformed file, or the same run is named twice.
    """
    given = list(paths)
    found = [path.resolve() for path in given]
    if twice := [str(path) for path in given if found.count(path.resolve()) > 1]:
        raise SetupError(f"{', '.join(dict.fromkeys(twice))}: named more than once; name each run once")
    return compare([_run(path) for path in given])


def _run(path: Path) -> Run:
    folder = open_run(path)
    summary = load_summary(folder.summary_json) if folder.summary_json.exists() else None
    return Run(
        label=str(path),
        manifest=_manifest(folder),
        table=load_metrics(folder.metrics_jsonl),
        status=summary.status.value if summary is not None else NOT_ENDED,
    )


def _manifest(folder: RunFolder) -> dict[str, object]:
    try:
        found = yaml.safe_load(read_text(folder.spec_yaml, "it contains the run's job: give another run, or repeat this one"))
    except yaml.YAMLError as error:
        raise SetupError(f"{folder.spec_yaml}: is not YAML ({error}); it should contain the run's job") from error
    if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
        raise SetupError(f"{folder.spec_yaml}: contains no job; it should contain the run's job")
    return found


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the page.

    Raises:
        RuntimeFault: it cannot be written.
    """
    from rljob_runtime.report.comparison_page import page  # plotly

    replace_text(path, page(comparison), "the comparison")


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Variants, results, fields that differ."""
    from rich.table import Table
    from rich.text import Text

    from rljob_runtime.report.words_of_comparison import cell_text, difference_text, significance_note

    labels = [variant.label for variant in comparison.variants]
    names = Table(box=None, pad_edge=False)
    for title in ("", "VARIANT", "SEEDS", "RUNS"):
        names.add_column(title, overflow="fold")
    for letter, variant in zip(_letters(len(labels)), comparison.variants, strict=True):
        runs = ", ".join(f"{run.label} ({run.status}, {counted(len(run.table.steps), 'step')})" for run in variant.runs)
        names.add_row(letter, Text(variant.label), ", ".join(str(run.seed) for run in variant.runs), Text(runs))
    console.print(names)
    console.print()
    results = Table(box=None, pad_edge=False)
    results.add_column("MEAN OVER SEEDS", overflow="fold")
    for letter in _letters(len(labels)):
        results.add_column(letter, justify="right", overflow="fold")
    for measure, cells in comparison.rows:
        results.add_row(measure.title, *(Text(cell_text(cell)) for cell in cells))
        if any(cell.against_first is not None for cell in cells):
            results.add_row("", *(Text(difference_text(cell), style="bold" if cell.is_significant else "grey62") for cell in cells))
    console.print(results)
    console.print(Text(significance_note(comparison), style="grey62"))
    if comparison.differences:
        console.print()
        console.print(_fields(comparison))


def _fields(comparison: Comparison) -> object:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("FIELD", overflow="fold")
    for letter in _letters(len(comparison.variants)):
        table.add_column(letter, overflow="fold")
    for path, values in comparison.differences.items():
        table.add_row(Text(path), *map(Text, values))
    return table


def _letters(count: int) -> Sequence[str]:
    """A, B, ... Z, 27, ..."""
    return [chr(ord("A") + index) if index < 26 else str(index + 1) for index in range(count)]
