"""``rljob top`` and ``rljob describe``: jobs of a cluster, or local runs by their folders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.v1alpha1.status import StepMilliseconds
from rljob_runtime import errors
from rljob_runtime.commands.advice import ADVICE
from rljob_runtime.commands.files import read_text
from rljob_runtime.commands.show_run import open_run
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.report.display import StepView, view_of
from rljob_runtime.report.faster import StepTimes, advice, of_milliseconds, typical
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import iter_rows
from rljob_runtime.report.metrics import load_metrics, record_of
from rljob_runtime.report.summary import load_summary
from rljob_runtime.report.text import format_count, format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]
RECENT_STEPS = 10
LOCAL = "local"
"""What runs on this machine have instead of a namespace."""
_CLUSTER_COLUMNS = ("namespace", "nodes", "attempt", "age")
"""Left out where all rows are runs on this machine, which have none of them."""


def top_rows(jobs: Iterable[Json], now: datetime | None = None) -> list[tuple[str, ...]]:
    """A row per RLJob: namespace, name, status, step, reward, tokens a second, nodes, attempt, age."""
    at = now or datetime.now(UTC)
    rows: list[tuple[str, ...]] = []
    for job in jobs:
        metadata, status = job["metadata"], job.get("status", {})
        progress = status.get("progress", {})
        total = progress.get("totalSteps")
        rows.append(
            (
                str(metadata.get("namespace", "")),
                str(metadata["name"]),
                state_of(status),
                f"{progress.get('step', 0)}/{total}" if total else "-",
                str(progress.get("reward", "-")),
                str(progress.get("tokensPerSecond", "-")),
                str(status.get("nodes", "-")),
                str(status.get("attempt", "-")),
                age(metadata.get("creationTimestamp"), at),
            )
        )
    return sorted(rows)


def local_rows(folders: Iterable[Path]) -> list[tuple[str, ...]]:
    """A row per local run, with the same columns.

    Raises:
        RuntimeFault: a folder is no run, or a file is malformed.
    """
    rows: list[tuple[str, ...]] = []
    for path in folders:
        folder = open_run(path)
        view, total = newest(folder), total_steps(folder)
        state = load_summary(folder.summary_json).status.value if folder.summary_json.exists() else "not ended"
        step = f"{view.step}/{total}" if view is not None else f"0/{total}"
        reward = f"{view.reward:.4f}" if view is not None and math.isfinite(view.reward) else "-"
        speed = format_count(view.tokens_per_s) if view is not None and math.isfinite(view.tokens_per_s) else "-"
        rows.append((LOCAL, str(path), state, step, reward, speed, "-", "-", "-"))
    return rows


def print_top(rows: Sequence[tuple[str, ...]], console: Console) -> None:
    """The table."""
    from rich.table import Table
    from rich.text import Text

    if not rows:
        console.print("no RLJobs")
        return
    table = Table(box=None, pad_edge=False)
    titles = ("namespace", "name", "status", "step", "reward", "tokens/s", "nodes", "attempt", "age")
    ages = titles.index("age")  # every RLJob has one, and its namespace may have any name
    is_local = all((row[0], row[ages]) == (LOCAL, "-") for row in rows)
    shown = [i for i, title in enumerate(titles) if not (is_local and title in _CLUSTER_COLUMNS)]
    for i in shown:
        table.add_column(titles[i].upper(), no_wrap=titles[i] != "name", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown))
    console.print(table)


def state_of(status: Mapping[str, Any]) -> str:
    """Reason of the condition Succeeded."""
    return next((str(c.get("reason")) for c in status.get("conditions", ()) if c.get("type") == "Succeeded"), "-")


def age(created: str | None, now: datetime) -> str:
    """How long ago, as ``5m`` or ``3d``."""
    if created is None:
        return "-"
    seconds = int((now - datetime.fromisoformat(created.replace("Z", "+00:00"))).total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{max(seconds, 0)}s"


def describe_job(job: Json, pods: Sequence[Json], console: Console) -> None:
    """Conditions, nodes, progress, where the time goes, the last failure with advice, placement."""
    metadata, status = job["metadata"], job.get("status", {})
    lines = [("job", f"{metadata.get('namespace', '')}/{metadata['name']}"), ("status", state_of(status))]
    for condition in status.get("conditions", ()):
        words = f"{condition.get('status')}, {condition.get('reason')}"
        lines.append((str(condition.get("type")), f"{words}: {condition['message']}" if condition.get("message") else words))
    lines += [
        ("nodes", f"{g['name']}: {g.get('ready', 0)} of {g.get('desired', 0)} ready, ranks {g.get('rankRange', '-')}")
        for g in status.get("nodeGroups", ())
    ]
    lines += [
        ("pod", f"{pod['metadata']['name']}: {pod.get('status', {}).get('phase', '-')} on {pod['spec'].get('nodeName', '-')}")
        for pod in pods
    ]
    if progress := status.get("progress"):
        lines.append(("progress", _progress(progress)))
        times = _times(progress)
        lines += [("time", _shares(times))] if times is not None else []
        lines += [("faster", text) for text in advice(_own_part(job), times)]
    failure = status.get("lastFailure")
    if failure:
        where = f" ({failure['podName']})" if failure.get("podName") else ""
        lines.append(("last failure", f"attempt {failure.get('attempt')}: {failure.get('reason')}{where}: {failure.get('message', '')}"))
    reason = failure.get("reason") if failure else state_of(status)
    if reason in ADVICE:
        lines.append(("advice", ADVICE[reason]))
    _print_lines(lines, console)
    _print_placement(job, console)


def describe_run(path: Path, console: Console) -> None:
    """State, progress, where the time goes, what would be faster and the last warnings of a local run; its placement.

    Raises:
        RuntimeFault: it is no run, or a file is malformed.
    """
    import yaml

    folder = open_run(path)
    view, total = newest(folder), total_steps(folder)
    lines = [("run", str(path))]
    if folder.summary_json.exists():
        summary = load_summary(folder.summary_json)
        lines.append(("status", summary.status.value))
        if summary.failure is not None:
            lines.append(("last failure", summary.failure))
            kind = getattr(errors, summary.failure.partition(":")[0], None)  # a foreign error has no reason, and so no advice
            if isinstance(kind, type) and issubclass(kind, RuntimeFault) and kind.reason in ADVICE:
                lines.append(("advice", ADVICE[kind.reason]))
    else:
        lines.append(("status", "not ended"))
    if view is None:
        lines.append(("progress", f"no step of {total} is done yet"))
    else:
        lines.append(("progress", f"step {view.step} of {total}, reward {view.reward:.3f}, {format_count(view.tokens_per_s)} tokens/s"))
        shares = ", ".join(f"{phase} {format_percent(share)}" for phase, share in view.phases)
        lines.append(("time", f"{format_seconds(view.step_s)} a step, mean of recent steps: {shares}; by worker: rljob timeline {path}"))
    spec_yaml = read_text(folder.spec_yaml, "the run's job is in it; give another run")
    lines += [("faster", text) for text in advice(spec_yaml, typical(load_metrics(folder.metrics_jsonl)))]
    warnings = [str(row.get("text")) for row in iter_rows(folder.events_jsonl) if row.get("level") == "warning"]
    lines += [("warning", text) for text in warnings[-3:]]
    _print_lines(lines, console)
    _print_placement(yaml.safe_load(spec_yaml), console)


def newest(folder: RunFolder) -> StepView | None:
    """Means of the last steps; None before the first.

    Raises:
        RuntimeFault: the file is malformed.
    """
    rows = list(iter_rows(folder.metrics_jsonl))[-RECENT_STEPS:]
    return view_of([record_of(row) for row in rows]) if rows else None


def total_steps(folder: RunFolder) -> int:
    """spec.training.steps of a run."""
    import yaml

    return int(yaml.safe_load(read_text(folder.spec_yaml, "the run's job is in it; give another run"))["spec"]["training"]["steps"])


def _progress(progress: Mapping[str, Any]) -> str:
    parts = [f"step {progress.get('step', 0)} of {progress.get('totalSteps', '-')}", f"weights v{progress.get('weightVersion', 0)}"]
    parts += [f"{name} {progress[key]}" for key, name in (("reward", "reward"), ("passRate", "passed")) if key in progress]
    parts += [f"{progress['tokensPerSecond']} tokens/s"] if "tokensPerSecond" in progress else []
    parts += [f"at {progress['lastUpdateTime']}"] if "lastUpdateTime" in progress else []
    return ", ".join(parts)


def _times(progress: Mapping[str, Any]) -> StepTimes | None:
    """What the job measured; None where it has not, or where its driver is of another version."""
    from pydantic import ValidationError

    try:
        return of_milliseconds(StepMilliseconds.model_validate(progress["stepMilliseconds"]))
    except (KeyError, ValidationError):
        return None


def _shares(times: StepTimes) -> str:
    phases = {
        "generate": times.generate_s,
        "reward": times.reward_s,
        "score": times.score_s,
        "train": times.train_s,
        "sync": times.sync_s,
        "rest": times.rest_s,
    }
    shares = ", ".join(
        f"{phase} {format_percent(seconds / times.step_s)}" for phase, seconds in phases.items() if seconds >= 0.005 * times.step_s
    )
    return f"{format_seconds(times.step_s)} a step: {shares}"


def _own_part(manifest: Json) -> Json:
    """The manifest as a user would write it."""
    document: Json = {key: manifest[key] for key in ("apiVersion", "kind", "spec") if key in manifest}
    document["metadata"] = {key: manifest["metadata"][key] for key in ("name", "namespace") if key in manifest["metadata"]}
    return document


def _print_lines(lines: Iterable[tuple[str, str]], console: Console) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="grey62")
    grid.add_column(overflow="fold")
    for label, words in lines:
        grid.add_row(label, Text(words))
    console.print(grid)


def _print_placement(manifest: Json, console: Console) -> None:
    """The picture of rljob plan; nothing where the spec is not valid, which a condition says already."""
    from rljob_api.errors import SpecInvalidError
    from rljob_api.validation import check
    from rljob_runtime.commands import show_plan

    console.print()
    try:
        show_plan.print_picture(check(_own_part(manifest), runnable=False), console)
    except (SpecInvalidError, RuntimeFault) as error:
        console.print(f"no placement: {error}", markup=False)
