"""The charts of ``report.html`` as plotly figures; labeled axes with units, one calm palette shared with the terminal.

Curves are shrunk to at most ``MAX_POINTS`` bucket means and the timeline to its first and last steps, so that a report stays
small (plotly.js, 4.8 MB, is nearly all of it) however long the run was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from rljob_runtime.report.band_chart import BandLanes, add_bands, choose
from rljob_runtime.report.bands import within
from rljob_runtime.report.jsonl import Row, number_of
from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.names import DRIVER_LANE, PHASES, describe
from rljob_runtime.report.text import bucket_means

MAX_POINTS = 600
MAX_SPANS = 1_500
MAX_LOG_LABELS = 6
TIMELINE_STEPS = 6
SMOOTH_STEPS = 10

PHASE_COLORS: Mapping[str, str] = {
    "generate": "#5b8fc7",
    "reward": "#e0a458",
    "score": "#c46a78",
    "validate": "#b78fb5",
    "train": "#6aa67a",
    "sync": "#9a83c4",
    "checkpoint": "#9aa3ad",
}
ENDS = "episode/stopped/"
END_COLORS: Mapping[str, str] = {
    "done": "#6aa67a",
    "maxTurns": "#e0a458",
    "maxTokens": "#b7a36b",
    "timeout": "#b78fb5",
    "error": "#c2606b",
}
SERIES_COLORS = ("#3f77b5", "#d98e3b", "#4f9463", "#8a6fc0", "#c2606b", "#7a8793")
OTHER_COLORS = ("#7fb6b0", "#c58fb0", "#b7a36b", "#8895c9", "#cf8f78", "#93a868")
_INK = "#3a4552"
_GRID = "#e9edf1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure with the words around it."""

    title: str
    note: str
    """One line under the title."""
    figure: go.Figure
    wide: bool = False
    """Whether it takes the full width of the page."""


def base_figure(x_title: str, y_title: str, *, height: int = 280, legend: bool = True, log: bool = False) -> go.Figure:
    """An empty figure with labeled axes."""
    figure = go.Figure()
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 16, "t": 8, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": _INK},
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        hovermode="x unified",
        xaxis={"title": {"text": x_title, "standoff": 6}, "gridcolor": _GRID, "zeroline": False, "linecolor": _GRID},
        yaxis={"title": {"text": y_title, "standoff": 6}, "gridcolor": _GRID, "zeroline": False, "type": "log" if log else "linear"},
    )
    if log:
        figure.update_yaxes(exponentformat="power", dtick=1)
    elif y_title == "bytes":
        figure.update_yaxes(exponentformat="SI")  # plotly calls 10^9 B, as in billion
    return figure


def rounded(values: Sequence[float]) -> list[float | None]:
    """Five digits are enough to draw; what is not finite is a gap."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values]


def running_mean(values: Sequence[float], length: int) -> list[float]:
    """Mean of each value with the finite ones of the ``length - 1`` before it; NaN where none is finite."""
    means: list[float] = []
    for index in range(len(values)):
        part = [v for v in values[max(0, index + 1 - length) : index + 1] if math.isfinite(v)]
        means.append(math.fsum(part) / len(part) if part else math.nan)
    return means


def _has(table: MetricsTable, name: str) -> bool:
    return any(math.isfinite(v) for v in table.column(name))


def _curve(figure: go.Figure, steps: Sequence[int], values: Sequence[float], name: str, color: str, **line: object) -> None:
    """Add a line; gaps (evaluations between steps) are joined and marked when points are few."""
    finite = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    xs = bucket_means([float(s) for s, _ in finite], MAX_POINTS)
    ys = bucket_means([v for _, v in finite], MAX_POINTS)
    mode = "lines+markers" if len(finite) <= 30 else "lines"
    style = {"color": color, "width": 2, **line}
    figure.add_trace(go.Scatter(x=rounded(xs), y=rounded(ys), name=name, mode=mode, marker={"size": 5}, line=style))


def _smoothed(table: MetricsTable, name: str, color: str, y_title: str) -> go.Figure:
    figure = base_figure("step", y_title)
    values = table.column(name)
    _curve(figure, table.steps, values, "each step", _tint(color), width=1)
    _curve(figure, table.steps, running_mean(values, SMOOTH_STEPS), f"mean of {SMOOTH_STEPS} steps", color, width=2.5)
    return figure


def _tint(color: str) -> str:
    """The same hue, half way to white."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(p + 255) // 2:02x}" for p in parts)


def _lines(table: MetricsTable, names: Sequence[str], y_title: str, *, log: bool = False) -> go.Figure | None:
    """One line a metric that some step has; None when no step has any (on a log axis: any above 0)."""
    figure = base_figure("step", y_title, log=log)
    present = [n for n in names if _has(table, n)]
    if log:
        present = [n for n in present if any(v > 0 for v in table.column(n))]
        figure.update_yaxes(dtick=_decades_per_tick([v for n in present for v in table.column(n) if v > 0]))
    for name, color in zip(present, SERIES_COLORS, strict=False):
        values = [v if v > 0 else math.nan for v in table.column(name)] if log else table.column(name)
        _curve(figure, table.steps, values, name, color)
    return figure if present else None


def _decades_per_tick(values: Sequence[float]) -> int:
    """So that a log axis has seven labels at most: more of them lie on top of each other."""
    decades = math.log10(max(values) / min(values)) if values else 0.0
    return max(1, math.ceil(decades / MAX_LOG_LABELS))


def _validation(table: MetricsTable) -> Chart:
    """Mean score and pass rate over the versions that were validated."""
    figure = base_figure("weights version", "score")
    for name, color in zip(("validation/mean", "validation/pass_rate"), SERIES_COLORS, strict=False):
        pairs = zip(table.column("validation/version"), table.column(name), strict=True) if _has(table, name) else ()
        points = [(version, value) for version, value in pairs if math.isfinite(value)]
        xs, ys = [p[0] for p in points], [p[1] for p in points]
        figure.add_trace(go.Scatter(x=xs, y=rounded(ys), name=name, mode="lines+markers", line={"color": color, "width": 2}))
    return Chart(title="Validation", note="the same prompts under one version after another", figure=figure)


def _ends(table: MetricsTable) -> Chart | None:
    """Shares of the reasons why episodes ended, stacked; None where there are no episodes."""
    names = sorted(name for name in table.columns if name.startswith(ENDS))
    if not names:
        return None
    figure = base_figure("step", "share of episodes")
    xs = rounded(bucket_means([float(step) for step in table.steps], MAX_POINTS))
    for number, name in enumerate(names):
        shares = [share if math.isfinite(share) else 0.0 for share in table.column(name)]
        color = END_COLORS.get(name.removeprefix(ENDS)) or OTHER_COLORS[number % len(OTHER_COLORS)]
        ys = rounded(bucket_means(shares, MAX_POINTS))
        line = {"width": 0}
        trace = go.Scatter(x=xs, y=ys, name=name.removeprefix(ENDS), stackgroup="ends", line=line, fillcolor=color, mode="lines")
        figure.add_trace(trace)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    return Chart(title="How episodes ended", note="done: by their environment, solved or not; others at a limit", figure=figure)


def metric_charts(table: MetricsTable) -> list[Chart]:
    """Reward, pass rate, episodes, length, speed, losses, gradient, trainer against engine, staleness; those a run has."""
    charts: list[Chart] = []
    if _has(table, "reward/mean"):
        figure = _smoothed(table, "reward/mean", SERIES_COLORS[0], "score")
        charts.append(Chart(title="Reward", note=describe("reward/mean").meaning, figure=figure))
    name, title = ("episode/success", "Success") if _has(table, "episode/success") else ("reward/pass_rate", "Pass rate")
    if _has(table, name):
        figure = _smoothed(table, name, SERIES_COLORS[2], "share passed")
        figure.update_yaxes(range=[-0.02, 1.02], tickformat=".0%")
        charts.append(Chart(title=title, note=describe(name).meaning, figure=figure))
    if _has(table, "validation/mean"):
        charts.append(_validation(table))
    wanted: tuple[tuple[str, str, tuple[str, ...], str, bool], ...] = (
        ("Turns of an episode", "actions until its end", ("episode/turns_mean", "episode/turns_max"), "turns", False),
        ("Environment time", describe("episode/environment_s").meaning, ("episode/environment_s",), "seconds an episode", False),
        ("Response length", "end-of-sequence token included", ("response/mean_tokens", "response/max_tokens"), "tokens", False),
        ("Speed", describe("rollout/tokens_per_s").meaning, ("rollout/tokens_per_s",), "tokens per second", False),
        ("Loss", "what the trainer minimized, by term", ("train/total_loss", "train/policy_loss", "train/kl_loss"), "loss", False),
        ("Gradient norm", describe("train/grad_norm").meaning, ("train/grad_norm",), "norm", False),
        (
            "Trainer against engine",
            "how far the two disagree about the same tokens; log scale",
            ("mismatch/max_abs_logprob_diff", "mismatch/kl_k3", "sync/probe_max_abs_diff"),
            "nats",
            True,
        ),
        (
            "Memory of workers that switch",
            "largest of all switches of a step, any worker",
            ("memory/device_peak_bytes", "memory/host_rss_bytes", "memory/pinned_bytes"),
            "bytes",
            False,
        ),
        ("Critic", describe("critic/explained_variance").meaning, ("critic/explained_variance", "critic/loss"), "1", False),
        ("Overlap", "share of a step", ("overlap/trainer_idle_fraction", "overlap/engine_busy_fraction"), "fraction", False),
        ("Staleness", "versions between drawing a token and training on it", ("staleness/mean", "staleness/max"), "versions", False),
    )
    if (ends := _ends(table)) is not None:
        charts.append(ends)
    for title, note, names, unit, log in wanted:
        lines = _lines(table, names, unit, log=log)
        if lines is not None:
            charts.append(Chart(title=title, note=note, figure=lines))
    return charts


def phase_chart(table: MetricsTable) -> Chart | None:
    """Seconds a step by phase, stacked; None when no step has phase times."""
    present = [p for p in PHASES if table.total(f"time/{p}_s") > 0]
    if not present:
        return None
    figure = base_figure("step", "seconds per step", height=300)
    xs = bucket_means([float(s) for s in table.steps], MAX_POINTS)
    for phase in present:
        values = [v if math.isfinite(v) else 0.0 for v in table.column(f"time/{phase}_s")]
        ys = rounded(bucket_means(values, MAX_POINTS))
        color = PHASE_COLORS[phase]
        figure.add_trace(go.Scatter(x=rounded(xs), y=ys, name=phase, stackgroup="time", line={"width": 0}, fillcolor=color, mode="lines"))
    if _has(table, "time/step_s"):
        _curve(figure, table.steps, table.column("time/step_s"), "whole step", SERIES_COLORS[-1], width=1, dash="dot")
    return Chart(title="Time by phase", note="phases that overlap stack above the whole step", figure=figure, wide=True)


def _reach(spans: Sequence[Row]) -> tuple[float, float]:
    """When the first begins and the last ends, in seconds."""
    return min(number_of(s, "start_s") for s in spans), max(number_of(s, "end_s") for s in spans)


def _gantt(spans: Sequence[Row], *, by_lane: bool, lanes: BandLanes | None = None) -> go.Figure:
    """Bars over wall time; one row a lane, or one row a phase; below them what was on the devices."""
    zero, end = _reach(spans)
    scale, unit = (1000.0, "ms") if end - zero < 2 else (1.0, "s")
    key = "lane" if by_lane else "phase"
    rows = list(dict.fromkeys(str(s[key]) for s in sorted(spans, key=lambda s: (str(s[key]) if by_lane else "", number_of(s, "start_s")))))
    figure = base_figure(f"wall time, {unit}", "", height=90 + 34 * len(rows), legend=by_lane)
    phases = list(dict.fromkeys(str(s["phase"]) for s in spans))
    others = [p for p in phases if p not in PHASE_COLORS]
    for phase in sorted(phases, key=lambda p: PHASES.index(p) if p in PHASES else len(PHASES)):
        mine = [s for s in spans if s["phase"] == phase]
        color = PHASE_COLORS.get(phase) or (OTHER_COLORS[others.index(phase) % len(OTHER_COLORS)] if by_lane else "#7fa3c9")
        hover = f"{phase}, step %{{text}}<br>%{{x:.4g}} {unit}<extra>%{{y}}</extra>" if by_lane else "%{y}: %{text}<extra></extra>"
        lengths = [(number_of(s, "end_s") - number_of(s, "start_s")) * scale for s in mine]
        figure.add_trace(
            go.Bar(
                orientation="h",
                name=phase,
                y=[str(s[key]) for s in mine],
                x=rounded(lengths),
                base=rounded([(number_of(s, "start_s") - zero) * scale for s in mine]),
                marker={"color": color, "line": {"width": 0.5, "color": "white"}},
                text=[str(s["step"]) if by_lane else f"{length / scale:.1f} s" for s, length in zip(mine, lengths, strict=True)],
                textposition="inside" if by_lane else "auto",
                insidetextanchor="middle",
                textangle=0,
                textfont={"size": 10},
                hovertemplate=hover,
            )
        )
    figure.update_layout(barmode="overlay", hovermode="closest", bargap=0.35, uniformtext={"minsize": 8, "mode": "hide"})
    figure.update_yaxes(categoryorder="array", categoryarray=rows[::-1], automargin=True, title=None, type="category")
    if lanes is not None:
        above, margins = 34 * len(rows), 90
        share = lanes.height_px / (lanes.height_px + above)
        figure.update_layout(height=margins + above + lanes.height_px)
        figure.update_yaxes(domain=[share, 1])
        add_bands(figure, lanes, (zero, end), zero, scale)
        figure.update_layout(yaxis2={"domain": [0, share], "anchor": "x"}, xaxis={"anchor": "y2"})
    return figure


def timeline_charts(spans: Sequence[Row], switches: Iterable[Row] = ()) -> list[Chart]:
    """Start-up, then who did what when in the first and in the last steps, and what was on the devices meanwhile.

    ``switches`` are rows of switches.jsonl, read once.
    """
    charts: list[Chart] = []
    around = [s for s in spans if s.get("lane") == DRIVER_LANE]
    inside = sorted((s for s in spans if s.get("lane") != DRIVER_LANE), key=lambda s: (number_of(s, "step"), number_of(s, "start_s")))
    if around:
        startup = [s for s in around if number_of(s, "step") == number_of(around[0], "step")][:40]
        charts.append(Chart(title="Start-up", note="before the first step", figure=_gantt(startup, by_lane=False), wide=True))
    steps = sorted({int(number_of(s, "step")) for s in inside})
    windows = [steps] if len(steps) <= 2 * TIMELINE_STEPS else [steps[:TIMELINE_STEPS], steps[-TIMELINE_STEPS:]]
    chosen = [[s for s in inside if window and window[0] <= number_of(s, "step") <= window[-1]] for window in windows]
    drawn = [some[:MAX_SPANS] for some in chosen if some]
    residency = within(switches, [_reach(some) for some in drawn])
    for shown, all_of_it, bands in zip(drawn, filter(None, chosen), residency, strict=True):
        note = "figures in the bars are steps"
        if len(all_of_it) > MAX_SPANS:
            note += f"; the first {MAX_SPANS} of {len(all_of_it)} spans are drawn, timeline.jsonl has all"
        lanes = choose(bands)
        if lanes is not None:
            note += lanes.note
        first, last = int(number_of(all_of_it[0], "step")), int(number_of(all_of_it[-1], "step"))
        figure = _gantt(shown, by_lane=True, lanes=lanes)
        charts.append(Chart(title=f"Timeline, steps {first} to {last}", note=note, figure=figure, wide=True))
    return charts
