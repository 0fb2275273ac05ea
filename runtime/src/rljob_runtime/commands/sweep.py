"""``rljob sweep``: the points of a sweep on this machine, one after the other, or as jobs for the queue of a cluster.

::

    sweep.yaml ── sweep_file ──> points ─┬─ local: a process each, resumed, run again or skipped by what its run folder holds ──> compare
                                         └─ --manifests: one file each ── --apply: kubectl apply ──> compare, once they are over
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rljob_api.validation import CheckedJob
from rljob_runtime.commands.files import read_text
from rljob_runtime.commands.kubectl import Kubectl
from rljob_runtime.commands.sweep_file import Point, Sweep
from rljob_runtime.errors import Interrupted, RuntimeFault, SetupError
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.loop.checkpointing import MARK
from rljob_runtime.report.disk import replace_text, writing
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.summary import RunStatus, load_summary

if TYPE_CHECKING:
    from rich.console import Console

LOOK_S = 1.0
APPLY_TIMEOUT_S = 120.0


class State(StrEnum):
    """What the run folder of a point holds."""

    NEW = "new"
    UNFINISHED = "unfinished"
    """Without a checkpoint: it is run again."""
    RESUMABLE = "resumable"
    """With a complete checkpoint: it goes on from it."""
    FINISHED = "finished"


MODES = {State.NEW: "new", State.UNFINISHED: "overwrite", State.RESUMABLE: "resume"}
Starter = Callable[[Path, Path, str, str], int]
"""(job file, run folder, mode, manifest): run a point to its end; its exit code."""
Report = Callable[[Point, int, int | None], None]
"""(point, steps done, exit code or None while it runs)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A point that is over."""

    point: Point
    folder: Path
    code: int
    skipped: bool = False


def state_of(folder: Path, job: CheckedJob) -> State:
    """What the folder of a point holds.

    Raises:
        RuntimeFault: it holds another job, or something that is no run.
    """
    run = RunFolder(folder)
    if run.is_vacant():
        return State.NEW
    if not run.holds_a_run():
        raise SetupError(f"{folder}: is not empty and is not a run folder; move it, or give another --run-dir")
    if run.spec_yaml.exists():
        wanted = job.job.model_dump(mode="json", by_alias=True, exclude_none=True)
        if (held := yaml.safe_load(read_text(run.spec_yaml, "move the folder away, or give another --run-dir"))) != wanted:
            raise SetupError(
                f"{folder}: holds a run of another job ({_first_difference(held, wanted)}); move it away, or give another --run-dir"
            )
    if run.summary_json.exists() and load_summary(run.summary_json).status is RunStatus.SUCCEEDED:
        return State.FINISHED
    return State.RESUMABLE if any(run.checkpoints.glob(f"*/{MARK}")) else State.UNFINISHED


def _first_difference(held: object, wanted: object) -> str:
    from rljob_runtime.report.comparison import ABSENT, flat

    here, there = flat(held), flat(wanted)
    path = next((p for p in sorted({*here, *there}) if here.get(p) != there.get(p)), "its text")
    return f"{path} is {here.get(path, ABSENT)} there and {there.get(path, ABSENT)} in the sweep"


def run_local(sweep: Sweep, root: Path, start: Starter, report: Report) -> list[Ended]:
    """Run every point that is not finished yet; one that fails does not keep the others from running.

    Raises:
        RuntimeFault: a folder holds something else; nothing was started.
        Interrupted: a point was interrupted; the sweep goes on from there.
    """
    states = [state_of(root / point.name, job) for point, job in zip(sweep.points, sweep.checked, strict=True)]
    with writing(root, "the folder of the sweep"):
        root.mkdir(parents=True, exist_ok=True)
    replace_text(root / "points.json", json.dumps({p.name: dict(p.values) for p in sweep.points}, indent=2) + "\n", "the list of points")
    ended: list[Ended] = []
    for point, state in zip(sweep.points, states, strict=True):
        folder = root / point.name
        if state is State.FINISHED:
            ended.append(Ended(point=point, folder=folder, code=0, skipped=True))
            report(point, 0, 0)
            continue
        report(point, 0, None)
        code = start(sweep.job_file, folder, MODES[state], yaml.safe_dump(point.manifest, sort_keys=False))
        ended.append(Ended(point=point, folder=folder, code=code))
        report(point, 0, code)
        if code == ExitCode.INTERRUPTED:
            raise Interrupted(
                f"interrupted at point {point.name} ({len(ended)} of {len(sweep.points)}); the same command continues from there"
            )
    return ended


def child_process(log_folder: Path, look: Callable[[Path], None]) -> Starter:
    """Runs a point in a process of its own, whose output is a file; ``look`` is called with its run folder once a second."""

    def start(job_file: Path, folder: Path, mode: str, manifest: str) -> int:
        log_folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "rljob_runtime.commands.sweep_point", str(job_file), str(folder), mode]
        with (log_folder / f"{folder.name}.log").open("a", encoding="utf-8") as log:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True)
            assert child.stdin is not None
            child.stdin.write(manifest)
            child.stdin.close()
            while True:
                try:
                    if (code := child.poll()) is not None:
                        return code
                    look(folder)
                    time.sleep(LOOK_S)
                except KeyboardInterrupt:  # the terminal sent it to the child as well, which ends in order; a second one ends it at once
                    continue

    return start


def steps_done(folder: Path) -> int:
    """Steps that a run has written so far."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def write_manifests(sweep: Sweep, folder: Path) -> list[Path]:
    """Write a manifest for each point; older ones of the same names are replaced.

    Raises:
        SetupError: the job names no queue, so that all points would start at once.
        RuntimeFault: a file cannot be written.
    """
    if any("queue" not in point.manifest["spec"] for point in sweep.points):
        raise SetupError("the jobs of a sweep wait in a queue, and the job names none: give --queue NAME, or set spec.queue.name")
    with writing(folder, "the folder of manifests"):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for point in sweep.points:
        path = folder / f"{point.name}.yaml"
        replace_text(path, f"# {point.words}\n{yaml.safe_dump(point.manifest, sort_keys=False)}", "a manifest")
        written.append(path)
    return written


def apply(paths: Sequence[Path], cluster: Kubectl) -> str:
    """Apply manifests in one call of kubectl; returns what it said.

    Raises:
        SetupError: there is no kubectl, it says why not, or it did not answer in time.
    """
    command = cluster.command("apply", *(word for path in paths for word in ("--filename", str(path))))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=APPLY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"kubectl apply did not answer within {APPLY_TIMEOUT_S:.0f} s; the same command may be repeated") from error
    except OSError as error:
        raise SetupError(f"kubectl cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise SetupError(f"kubectl apply: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def compare_command(sweep: Sweep, namespace: str | None) -> str:
    """How to compare the runs of a cluster, once they are over."""
    storage: Any = sweep.checked[0].job.spec.storage
    if storage is None:
        return "the runs are lost with their pods: set spec.storage to compare them"
    place = f"{storage.mount_path}/{namespace or 'NAMESPACE'}"
    return f"where the volume is mounted: rljob compare {' '.join(f'{place}/{point.name}' for point in sweep.points)}"


def print_points(sweep: Sweep, console: Console) -> None:
    """A table of the points."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("POINT", no_wrap=True)
    for path in sweep.points[0].values:
        table.add_column(Text(path.removeprefix("spec.").replace(".", ".\n")), overflow="fold")  # as text: [name] is no markup
    for point in sweep.points:
        table.add_row(point.name, *(Text(json.dumps(value)) for value in point.values.values()))
    console.print(table)


def run_shown(sweep: Sweep, root: Path, console: Console) -> list[Ended]:
    """:func:`run_local` with bars on a terminal, and lines elsewhere.

    Raises:
        RuntimeFault, Interrupted: as of it.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    steps = {job.job.metadata.name: job.job.spec.training.steps for job in sweep.checked}
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    every = bars.add_task("points", total=len(sweep.points))
    inner = bars.add_task("", total=None)

    def report(point: Point, done: int, code: int | None) -> None:
        if code is None:
            bars.reset(inner, description=point.words, total=max(steps[point.name], 1))
            if not console.is_terminal:
                console.print(f"{point.name}: {point.words}", markup=False, highlight=False)
            return
        bars.advance(every)
        if code or not console.is_terminal:
            console.print(f"{point.name}: {'done' if code == 0 else f'exit code {code}'}", markup=False, highlight=False)

    with bars:
        start = child_process(root / "logs", lambda folder: bars.update(inner, completed=steps_done(folder)))
        return run_local(sweep, root, start, report)


def failures(ended: Sequence[Ended], root: Path) -> RuntimeFault | None:
    """What to say of the points that failed; None where none did."""
    failed = [one for one in ended if one.code]
    if not failed:
        return None
    lines = [f"{one.point.name} ({one.point.words}): exit code {one.code}; {root / 'logs' / one.folder.name}.log" for one in failed]
    return RuntimeFault(f"{len(failed)} of {len(ended)} points failed; the same command runs them again:\n  " + "\n  ".join(lines))
