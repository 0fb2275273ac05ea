"""What a user sees while a run goes on: the border, and the plain lines for logs and pipes.

``Reporter`` calls a ``Display`` from the driver's thread and from its own ticker, one call at a time. Two are offered:
``LiveDisplay`` (``report.live``) on a terminal, ``PlainDisplay`` everywhere else; ``report.choose_display`` picks one, never both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TextIO

from rljob_api.errors import counted
from rljob_runtime.records import StepRecord
from rljob_runtime.report.jsonl import Clock
from rljob_runtime.report.names import PHASES
from rljob_runtime.report.summary import RunSummary, summary_rows
from rljob_runtime.report.text import format_count, format_percent, format_seconds, format_tokens

SHORT_PHASES: Mapping[str, str] = {
    "generate": "gen",
    "reward": "reward",
    "score": "score",
    "train": "train",
    "sync": "sync",
    "checkpoint": "ckpt",
}


class Level(StrEnum):
    """How much an event matters."""

    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What is known of a run before it starts."""

    job_name: str
    model: str
    algorithm: str
    devices: str
    """Who runs where, in words: ``trainer cpu 0, engines cpu 1-2``."""
    total_steps: int
    seed: int
    spec_yaml: str
    """The resolved spec, shown in the report and kept as spec.yaml."""
    model_commit: str | None = None
    """Of a model on the Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseView:
    """A start-up or closing phase that is running or has ended."""

    name: str
    elapsed_s: float


class Display(Protocol):
    """Shows a run; every method returns at once."""

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """Called once, first. ``resumed_step`` is the last step that is kept, None for a new run."""

    def history(self, records: Sequence[StepRecord]) -> None:
        """Called on resume, and where a run goes on from a checkpoint, with the steps that are kept, oldest first."""

    def phase_started(self, name: str) -> None:
        """A start-up or closing phase begins; several may run at once."""

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """It ended, by an exception when ``failed``."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def event(self, text: str, level: Level) -> None:
        """Something worth a line happened."""

    def tick(self, running: Sequence[PhaseView]) -> None:
        """Called about once a second with the phases that are running."""

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """Called once at the end; ``report`` is None when it could not be written."""

    def close(self) -> None:
        """Give the terminal back; called last, also after an error, maybe twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The means of some successive steps; NaN where no step has the metric."""

    step: int
    version: int
    reward: float
    pass_rate: float
    response_tokens: float
    turns: float
    """Of an episode."""
    tokens_per_s: float
    step_s: float
    phases: tuple[tuple[str, float], ...]
    """Phases with their share of the step time, in display order, those under 0.5 % left out. Overlap can bring the sum above 1."""


def mean_of(records: Sequence[StepRecord], name: str) -> float:
    """Mean of a metric over the records that have it finite; NaN where none has."""
    values = [v for r in records if (v := r.metrics.get(name)) is not None and math.isfinite(v)]
    return math.fsum(values) / len(values) if values else math.nan


def view_of(records: Sequence[StepRecord]) -> StepView:
    """Average successive steps.

    Raises:
        ValueError: there is no record.
    """
    if not records:
        raise ValueError("a view needs at least one step record, got none")
    step_s = mean_of(records, "time/step_s")
    shares = [(phase, mean_of(records, f"time/{phase}_s") / step_s) for phase in PHASES if step_s > 0]
    return StepView(
        step=records[-1].step,
        version=records[-1].version,
        reward=mean_of(records, "reward/mean"),
        pass_rate=mean_of(records, "reward/pass_rate"),
        response_tokens=mean_of(records, "response/mean_tokens"),
        turns=mean_of(records, "episode/turns_mean"),
        tokens_per_s=mean_of(records, "rollout/tokens_per_s"),
        step_s=step_s,
        phases=tuple((phase, share) for phase, share in shares if share >= 0.005),
    )


def plain_line(view: StepView, total_steps: int) -> str:
    """One compact line; what no step reported is left out."""
    parts = [f"step {view.step:>{len(str(total_steps))}}/{total_steps}"]
    if math.isfinite(view.reward):
        parts.append(f"reward {view.reward:.3f}")
    if math.isfinite(view.pass_rate):
        parts.append(f"pass {format_percent(view.pass_rate):>4}")
    if math.isfinite(view.response_tokens):
        parts.append(f"len {format_tokens(view.response_tokens)}")
    if math.isfinite(view.turns):
        parts.append(f"turns {view.turns:.1f}")
    if math.isfinite(view.tokens_per_s):
        parts.append(f"{format_count(view.tokens_per_s)} tok/s")
    if math.isfinite(view.step_s):
        shares = " ".join(f"{SHORT_PHASES[phase]} {format_percent(share)}" for phase, share in view.phases)
        parts.append(format_seconds(view.step_s) + (f" ({shares})" if shares else ""))
    parts.append(f"v{view.version}")
    return "  ".join(parts)


class PlainDisplay:
    """Lines for logs: the first and the last step, and one line each ``every_s`` seconds with the means since the line before."""

    def __init__(self, stream: TextIO, *, clock: Clock, every_s: float = 5.0) -> None:
        """``stream`` takes the lines; each is flushed, so that a log collector sees it at once."""
        self._stream = stream
        self._clock = clock
        self._every_s = every_s
        self._total_steps = 0
        self._since_line: list[StepRecord] = []
        self._last_line_s: float | None = None
        self._nags: Counter[str] = Counter()

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """Two lines: what runs, and where its files are."""
        self._total_steps = info.total_steps
        self._line(
            f"{info.job_name}: {info.model}, {info.algorithm}, {counted(info.total_steps, 'step')}, seed {info.seed}, {info.devices}"
        )
        self._line(f"files in {folder}" + (f", resumed after step {resumed_step}" if resumed_step is not None else ""))

    def history(self, records: Sequence[StepRecord]) -> None:
        """Plain lines have no history."""

    def phase_started(self, name: str) -> None:
        """Print what is being waited for, so that a log never ends without a reason."""
        self._line(f"{name} ...")

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """Print how long it took."""
        self._nags.pop(phase.name, None)
        self._line(f"{phase.name}: {'failed after ' if failed else ''}{format_seconds(phase.elapsed_s)}")

    def step(self, record: StepRecord) -> None:
        """A line when it is time for one; none for a validation alone, whose scores the closing block has."""
        if not self._total_steps:
            return
        self._since_line.append(record)
        now = self._clock()
        due = self._last_line_s is None or now - self._last_line_s >= self._every_s
        if due or record.step >= self._total_steps:
            self._step_line(now)

    def _step_line(self, now_s: float) -> None:
        self._line(plain_line(view_of(self._since_line), self._total_steps))
        self._since_line.clear()
        self._last_line_s = now_s

    def event(self, text: str, level: Level) -> None:
        """One line at once."""
        self._line(f"{level.value}: {text}")

    def tick(self, running: Sequence[PhaseView]) -> None:
        """Repeat each half minute what is still being waited for."""
        for phase in running:
            if phase.elapsed_s >= 30 * (self._nags[phase.name] + 1):
                self._nags[phase.name] = int(phase.elapsed_s // 30)
                self._line(f"{phase.name} ... {format_seconds(phase.elapsed_s)}")

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """The steps not shown yet, then the closing block."""
        if self._since_line:
            self._step_line(self._clock())
        rows = summary_rows(summary, report)
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            self._line(f"{label:<{width}}  {text}")

    def close(self) -> None:
        """Nothing to give back."""


class Displays:
    """Several displays that get the same calls, in order."""

    def __init__(self, displays: Sequence[Display]) -> None:
        """Order matters where one of them reports on another's stream."""
        self._displays = tuple(displays)

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.started(info, folder, resumed_step)

    def history(self, records: Sequence[StepRecord]) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.history(records)

    def phase_started(self, name: str) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.phase_started(name)

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.phase_ended(phase, failed=failed)

    def step(self, record: StepRecord) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.step(record)

    def event(self, text: str, level: Level) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.event(text, level)

    def tick(self, running: Sequence[PhaseView]) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.tick(running)

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.finished(summary, report)

    def close(self) -> None:
        """See :class:`Display`."""
        for display in self._displays:
            display.close()
