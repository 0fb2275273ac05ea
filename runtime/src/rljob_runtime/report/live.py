"""The live display on a terminal, drawn with rich: one panel that is redrawn a few times a second.

rich's refresh thread calls ``render``; the driver's thread only swaps small immutable values, so a step costs microseconds.
``render`` is a pure function of the state and the clock, and is tested as such.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljob_runtime.records import StepRecord
from rljob_runtime.report.display import SHORT_PHASES, Level, PhaseView, RunInfo, StepView, mean_of, view_of
from rljob_runtime.report.jsonl import Clock
from rljob_runtime.report.summary import RunStatus, RunSummary, summary_rows
from rljob_runtime.report.text import format_bytes, format_count, format_percent, format_seconds, format_tokens, format_value, sparkline

PHASE_STYLES = {
    "generate": "dodger_blue2",
    "reward": "orange3",
    "train": "green4",
    "sync": "medium_purple3",
    "checkpoint": "grey50",
}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_LABEL_WIDTH = 11
_VALUE_WIDTH = 11
_RECENT_STEPS = 5
"""Figures are means over so many steps: steady enough to read, fresh enough to trust."""
_ETA_STEPS = 50
_HISTORY_STEPS = 2_000
"""The sparklines reach back so far: every frame walks over them, and the report has the whole run."""
_MAX_EVENTS = 3
_MAX_WIDTH = 120


def stacked_bar(shares: Sequence[tuple[str, float]], width: int) -> Text:
    """A bar of ``width`` cells, one color a phase; what no phase claims stays light, overlap above 1 is scaled down."""
    total = max(1.0, math.fsum(share for _, share in shares))
    bar = Text()
    claimed, drawn = 0.0, 0
    for phase, share in shares:
        claimed += share / total
        end = round(claimed * width)
        bar.append("█" * (end - drawn), style=PHASE_STYLES[phase])
        drawn = end
    bar.append("░" * (width - drawn), style="grey35")
    return bar


class LiveDisplay:
    """A panel with progress, the main figures with their history, phase times, and the last events."""

    def __init__(self, console: Console, *, clock: Clock, refresh_per_s: float = 6.0) -> None:
        """Draws on ``console``; ``clock`` turns the spinner and measures phases."""
        self._console = console
        self._clock = clock
        self._refresh_per_s = refresh_per_s
        self._info: RunInfo | None = None
        self._folder = Path()
        self._resumed_step: int | None = None
        self._records: deque[StepRecord] = deque(maxlen=_HISTORY_STEPS)
        self._own_steps = 0
        self._running: dict[str, float] = {}
        self._ended: list[tuple[PhaseView, bool]] = []
        self._events: deque[tuple[str, Level]] = deque(maxlen=_MAX_EVENTS)
        self._live: Live | None = None

    # ---- Display -----------------------------------------------------------------------------------------------

    def started(self, info: RunInfo, folder: Path, resumed_step: int | None) -> None:
        """Begin drawing."""
        self._info, self._folder, self._resumed_step = info, folder, resumed_step
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=self._refresh_per_s)
        self._live.start()

    def history(self, records: Sequence[StepRecord]) -> None:
        """Fill the sparklines with what came before the resume."""
        self._records.clear()
        self._records.extend(records)

    def phase_started(self, name: str) -> None:
        """Show a spinner."""
        self._running = {**self._running, name: self._clock()}

    def phase_ended(self, phase: PhaseView, *, failed: bool) -> None:
        """Turn the spinner into a mark."""
        self._running = {name: start for name, start in self._running.items() if name != phase.name}
        self._ended = [*self._ended, (phase, failed)]

    def step(self, record: StepRecord) -> None:
        """Take a step in; the next frame shows it."""
        self._records.append(record)
        self._own_steps += 1

    def event(self, text: str, level: Level) -> None:
        """Show the line under the figures."""
        self._events.append((text, level))

    def tick(self, running: Sequence[PhaseView]) -> None:
        """Frames come from rich's own thread."""

    def finished(self, summary: RunSummary, report: Path | None) -> None:
        """Leave the last frame standing and write the closing block under it."""
        self.close()
        self._console.print(self.closing(summary, report))

    def close(self) -> None:
        """Stop drawing; the last frame stays."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    # ---- frames ------------------------------------------------------------------------------------------------

    def render(self) -> RenderableType:
        """The panel as of now, as wide as the console up to 120 columns."""
        info = self._info
        if info is None:
            return Text("")
        width = min(self._console.width, _MAX_WIDTH)
        inner = width - 4
        records = tuple(self._records.copy())
        parts: list[RenderableType] = [self._header(info), Text("")]
        if records:
            parts += [self._progress(info, records), Text(""), self._figures(records, inner)]
        if not self._own_steps:
            parts += ([Text("")] if records else []) + [self._phase_line(view, failed) for view, failed in tuple(self._ended)]
        parts += [self._running_line(name, start) for name, start in self._running.items()]
        if self._events:
            parts += [Text(""), *(self._event_line(text, level) for text, level in tuple(self._events.copy()))]
        title = Text.assemble((f" {info.job_name} ", "bold"))
        return Panel(Group(*parts), title=title, title_align="left", border_style="grey50", box=box.ROUNDED, width=width, padding=(0, 1))

    def _header(self, info: RunInfo) -> RenderableType:
        lines = Table.grid(padding=(0, 2))
        lines.add_column(no_wrap=True, overflow="ellipsis")
        what = Text.assemble((info.model, "bold"), "  ", info.algorithm, "  ", (info.devices, "grey62"))
        where = f"seed {info.seed}  {self._folder}"
        if self._resumed_step is not None:
            where += f"  resumed after step {self._resumed_step}"
        lines.add_row(what)
        lines.add_row(Text(where, style="grey62"))
        return lines

    def _progress(self, info: RunInfo, records: Sequence[StepRecord]) -> RenderableType:
        step, total = records[-1].step, info.total_steps
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        if not total:
            grid.add_row(Text("validation", style="bold"), "")
            return grid
        label = Text.assemble((f"step {step}/{total}", "bold"), f"  {format_percent(step / total)}")
        step_s = mean_of(records[-_ETA_STEPS:], "time/step_s")
        if step < total and math.isfinite(step_s):
            label.append(f"  about {format_seconds((total - step) * step_s)} left")
        bar = ProgressBar(total=total, completed=min(step, total), complete_style="green4", finished_style="green4", style="grey30")
        grid.add_row(bar, label)
        return grid

    def _figures(self, records: Sequence[StepRecord], inner: int) -> RenderableType:
        view = view_of(records[-_RECENT_STEPS:])
        grid = Table.grid(padding=(0, 2, 0, 0), expand=False)
        grid.add_column(width=_LABEL_WIDTH, style="grey62", no_wrap=True)
        grid.add_column(width=_VALUE_WIDTH, no_wrap=True, justify="right")
        note_width = 24 if inner >= 90 else 0
        chart_width = inner - _LABEL_WIDTH - _VALUE_WIDTH - 4 - (note_width + 2 if note_width else 0)
        grid.add_column(width=chart_width, no_wrap=True)
        if note_width:
            grid.add_column(width=note_width, style="grey62", no_wrap=True, overflow="ellipsis")
        for label, value, name, style, note in self._rows(view, records):
            series = [r.metrics.get(name, math.nan) for r in records]
            cells: list[RenderableType] = [label, Text(value, style="bold"), Text(sparkline(series, chart_width), style=style)]
            grid.add_row(*cells, *([note] if note_width else []))
        if math.isfinite(view.step_s):
            grid.add_row("step time", Text(format_seconds(view.step_s), style="bold"), stacked_bar(view.phases, chart_width))
        return Group(grid, self._legend(view, wide=note_width > 0), self._versions(view, records))

    @staticmethod
    def _rows(view: StepView, records: Sequence[StepRecord]) -> list[tuple[str, str, str, str, str]]:
        """Label, value, metric plotted, color, note; rows whose metric no step has are left out."""
        recent = records[-_RECENT_STEPS:]
        best = max((v for r in records if math.isfinite(v := r.metrics.get("reward/mean", math.nan))), default=math.nan)
        longest = mean_of(recent, "response/max_tokens")
        cut = mean_of(recent, "response/truncated_fraction")
        mismatch = mean_of(recent, "mismatch/kl_k3")
        passed = "success" if math.isfinite(view.turns) else "pass rate"  # the same share, as agentic jobs call it
        rows = [
            ("reward", f"{view.reward:.3f}", view.reward, "reward/mean", "green3", f"best step {best:.3f}"),
            (passed, format_percent(view.pass_rate), view.pass_rate, "reward/pass_rate", "green3", _failures(recent)),
            ("turns", f"{view.turns:.1f}", view.turns, "episode/turns_mean", "dodger_blue2", _environment(recent)),
            (
                "response",
                f"{format_tokens(view.response_tokens)} tok",
                view.response_tokens,
                "response/mean_tokens",
                "dodger_blue2",
                f"max {format_count(longest)}, {format_percent(cut)} cut" if math.isfinite(longest + cut) else "",
            ),
            ("speed", f"{format_count(view.tokens_per_s)} tok/s", view.tokens_per_s, "rollout/tokens_per_s", "dodger_blue2", ""),
        ]
        norm = mean_of(recent, "train/grad_norm")
        note = f"mismatch {format_value(mismatch)} nats" if math.isfinite(mismatch) else ""
        rows.append(("grad norm", format_value(norm), norm, "train/grad_norm", "orange3", note))
        return [(label, value, name, style, text) for label, value, number, name, style, text in rows if math.isfinite(number)]

    @staticmethod
    def _legend(view: StepView, *, wide: bool) -> Text:
        indent = _LABEL_WIDTH + 2 + (_VALUE_WIDTH + 2 if wide else 0)
        legend = Text(" " * indent, no_wrap=True, overflow="ellipsis")
        names = {phase: phase for phase in SHORT_PHASES} if wide else SHORT_PHASES
        for phase, share in view.phases:
            legend.append("■ ", style=PHASE_STYLES[phase])
            legend.append(f"{names[phase]} {format_percent(share)}  ", style="grey62")
        return legend

    @staticmethod
    def _versions(view: StepView, records: Sequence[StepRecord]) -> Text:
        recent = records[-_RECENT_STEPS:]
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("weights".ljust(_LABEL_WIDTH + 2), style="grey62")
        line.append(f"v{view.version}".rjust(_VALUE_WIDTH), style="bold")
        staleness, sent, probe = (mean_of(recent, n) for n in ("staleness/mean", "sync/bytes", "sync/probe_max_abs_diff"))
        notes = []
        if math.isfinite(staleness):
            notes.append(f"staleness {format_count(staleness)}")
        if math.isfinite(sent):
            notes.append(f"{format_bytes(sent)} a sync")
        if math.isfinite(probe):
            notes.append(f"probe {format_value(probe)} nats")
        line.append("  " + ", ".join(notes), style="grey62")
        return line

    @staticmethod
    def _phase_line(phase: PhaseView, failed: bool) -> Text:
        mark = ("✗ ", "red3") if failed else ("✓ ", "green3")
        return Text.assemble(mark, f"{phase.name}  ", (format_seconds(phase.elapsed_s), "grey62"), no_wrap=True, overflow="ellipsis")

    def _running_line(self, name: str, start_s: float) -> Text:
        now = self._clock()
        frame = _SPINNER[int(now * self._refresh_per_s) % len(_SPINNER)]
        elapsed = (format_seconds(now - start_s), "grey62")
        return Text.assemble((f"{frame} ", "dodger_blue2"), f"{name}  ", elapsed, no_wrap=True, overflow="ellipsis")

    @staticmethod
    def _event_line(text: str, level: Level) -> Text:
        style = "orange3" if level is Level.WARNING else "grey62"
        return Text(("! " if level is Level.WARNING else "· ") + text, style=style, no_wrap=True, overflow="ellipsis")

    @staticmethod
    def closing(summary: RunSummary, report: Path | None) -> RenderableType:
        """The closing block; the status is colored, long paths wrap."""
        color = {RunStatus.SUCCEEDED: "bold green3", RunStatus.FAILED: "bold red3", RunStatus.INTERRUPTED: "bold orange3"}[summary.status]
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True, style="grey62")
        grid.add_column(overflow="fold")
        for index, (label, text) in enumerate(summary_rows(summary, report)):
            grid.add_row(Text(label, style=color if index == 0 else ""), Text(text))
        return grid


def _environment(records: Sequence[StepRecord]) -> str:
    """How long an episode waits for its environment."""
    waited_s = mean_of(records, "episode/environment_s")
    if not math.isfinite(waited_s):
        return ""
    return f"environment {waited_s * 1000:.0f} ms" if waited_s < 0.1 else f"environment {format_seconds(waited_s)}"


def _failures(records: Sequence[StepRecord]) -> str:
    """Episodes that failed, in one step of the last ones."""
    failed = mean_of(records, "episode/errors") + mean_of(records, "episode/timeouts")
    return f"{format_count(failed)} failed a step" if failed > 0 else ""
