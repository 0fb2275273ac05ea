"""What a run left in its folder, for people: ``rljob show``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rljob_runtime.commands.files import read_text
from rljob_runtime.errors import SetupError
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import Row, iter_rows
from rljob_runtime.report.reading import Selection, ShownTrajectory, select
from rljob_runtime.report.trajectories import read_trajectories, sampled_steps

if TYPE_CHECKING:
    from rich.console import Console


def open_run(path: Path) -> RunFolder:
    """The run folder at ``path``; nothing is made.

    Raises:
        SetupError: it is none.
    """
    folder = RunFolder(path)
    if not folder.holds_a_run():
        raise SetupError(f"{path}: is not a run folder; give the one that a run wrote, for example runs/quickstart")
    return folder


def trajectories(folder: RunFolder, wanted: Selection, step: int | None = None) -> list[ShownTrajectory]:
    """The kept trajectories that are asked for, of one step or of all.

    Raises:
        SetupError: none were kept, or none of that step, or none is as asked for; says which there are.
        RuntimeFault: a file is malformed.
    """
    steps = sampled_steps(folder)
    if not steps:
        raise SetupError(f"{folder.path}: no trajectories were kept; spec.report.trajectoriesEverySteps says at which steps they are")
    if step is not None and step not in steps:
        raise SetupError(f"{folder.path}: none were kept at step {step}, but at {_listed(steps)}; spec.report.trajectoriesEverySteps")
    rows = [row for kept in (steps if step is None else [step]) for row in read_trajectories(folder, kept)]
    found = select(rows, wanted)
    if not found:
        raise SetupError(f"{folder.path}: none of the {len(rows)} kept trajectories match; there are {_there(rows)}")
    return found


def print_summary(folder: RunFolder, console: Console) -> None:
    """How the run went, or how far it is.

    Raises:
        RuntimeFault: a file is malformed.
    """
    from rich.table import Table
    from rich.text import Text

    from rljob_runtime.report.summary import load_summary, summary_rows

    if folder.summary_json.exists():
        lines = summary_rows(load_summary(folder.summary_json), folder.report_html if folder.report_html.exists() else None)
    else:
        lines = [("not ended", _newest_step(folder))]
    steps = sampled_steps(folder)
    lines.append(("trajectories", f"kept at {_listed(steps)}; see --trajectories" if steps else "none kept"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="grey62")
    grid.add_column(overflow="fold")
    for label, text in lines:
        grid.add_row(label, Text(text))
    console.print(grid)


def _newest_step(folder: RunFolder) -> str:
    """The last step of a run that goes on, or was killed."""
    from rljob_runtime.report.display import plain_line, view_of
    from rljob_runtime.report.metrics import record_of

    *_, last = None, *iter_rows(folder.metrics_jsonl)
    if last is None:
        return "no step is done yet"
    spec = yaml.safe_load(read_text(folder.spec_yaml, "the run's job is in it; give another run"))["spec"]
    return plain_line(view_of([record_of(last)]), spec["training"]["steps"])


def _listed(steps: Iterable[int]) -> str:
    """``steps 1, 10, 20, ..., 190, 200``."""
    every = list(steps)
    shown = [str(step) for step in every] if len(every) <= 8 else [*map(str, every[:4]), "...", *map(str, every[-3:])]
    return f"step{'' if len(every) == 1 else 's'} {', '.join(shown)}"


def _there(rows: Iterable[Row]) -> str:
    """Groups and sources of kept trajectories."""
    kept = list(rows)
    groups = sorted({int(str(row.get("group_id"))) for row in kept})
    sources = sorted({str(row.get("source")) for row in kept})
    few = ", ".join(map(str, groups[:8])) + (", ..." if len(groups) > 8 else "")
    return f"groups {few} of {', '.join(sources)}"
