"""The page of ``rljob compare``: curves on the same axes, fields that differ, and what the differences are worth. Self-contained."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from rljob_api.errors import counted
from rljob_runtime.report.charts import MAX_POINTS, OTHER_COLORS, SERIES_COLORS, SMOOTH_STEPS, Chart, base_figure, rounded, running_mean
from rljob_runtime.report.comparison import Cell, Comparison, Measure, Run, Variant
from rljob_runtime.report.html import PAGE_STYLE, cards
from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.text import bucket_means
from rljob_runtime.report.words_of_comparison import cell_text, difference_text, significance_note

COLORS = (*SERIES_COLORS, *OTHER_COLORS)
CURVES = (
    ("reward/mean", "Reward", "score"),
    ("validation/mean", "Validation", "score"),
    ("response/mean_tokens", "Length of responses", "tokens"),
    ("train/entropy", "Entropy", "nats"),
    ("train/grad_norm", "Gradient norm", "norm"),
    ("mismatch/kl_k3", "Trainer against engines", "KL, nats"),
    ("rollout/tokens_per_s", "Speed", "tokens/s"),
    ("time/step_s", "Time of a step", "seconds"),
)
MAX_LEGEND_CHARACTERS = 44
"""What fits a window of 390 pixels."""
_STYLE = """
.wrap { overflow-x: auto; } .wrap table { table-layout: auto; } .wrap th, .wrap td { overflow-wrap: anywhere; }
.wrap .word { white-space: nowrap; overflow-wrap: normal; }
.wrap td.path { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 7px; }
@media (max-width: 640px) { main { padding: 16px 10px 40px; } th, td { padding: 6px 8px; } .card { padding: 10px 8px; }
  .wrap th, .wrap td { font-size: 12.5px; } .wrap .word { white-space: normal; } }
"""


def page(comparison: Comparison) -> str:
    """The page's text; about 5 MB, nearly all of it plotly.js."""
    charts = [chart for name, title, unit in CURVES if (chart := _curves(comparison, name, title, unit)) is not None]
    charts += [chart] if (chart := _over_time(comparison)) is not None else []
    count = sum(len(variant.runs) for variant in comparison.variants)
    title = f"{count} runs of {len(comparison.variants)} job{'' if len(comparison.variants) == 1 else 's'}"
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{title} - comparison</title><style>{PAGE_STYLE}{_STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body><main><header><h1>{title}</h1>",
        '<p class="sub">Runs whose jobs differ only in seed and name are one variant; the first variant is the baseline.</p></header>',
        f"<h2>Variants</h2>{_variants(comparison.variants)}",
        f"<h2>Results</h2>{_results(comparison)}",
    ]
    parts += [f"<h2>Curves</h2>{cards(charts, 'c')}"] if charts else []
    parts += [f"<h2>Fields that differ</h2>{_differences(comparison)}", _script(charts), "</main></body></html>"]
    return "\n".join(parts) + "\n"


def _dot(index: int) -> str:
    return f'<i class="dot" style="background:{COLORS[index % len(COLORS)]}"></i>'


def _variants(variants: Sequence[Variant]) -> str:
    rows = "".join(
        f"<tr><td>{_dot(i)}{escape(v.label)}</td><td>{escape(', '.join(str(r.seed) for r in v.runs))}</td>"
        f"<td>{escape(', '.join(_state(r) for r in v.runs))}</td></tr>"
        for i, v in enumerate(variants)
    )
    head = "".join(f'<th class="word">{title}</th>' for title in ("variant", "seeds", "runs"))
    return f'<div class="wrap"><table><tr>{head}</tr>{rows}</table></div>'


def _state(run: Run) -> str:
    return f"{run.label} ({run.status}, {counted(len(run.table.steps), 'step')})"


def _results(comparison: Comparison) -> str:
    head = "".join(f'<th class="num">{_dot(i)}{escape(v.label)}</th>' for i, v in enumerate(comparison.variants))
    rows = "".join(
        f"<tr><td>{escape(measure.title)}</td>{''.join(_cell(measure, cell) for cell in cells)}</tr>" for measure, cells in comparison.rows
    )
    table = f'<div class="wrap"><table><tr><th class="word">mean over seeds ± standard deviation</th>{head}</tr>{rows}</table></div>'
    return f'{table}<p class="small">{escape(significance_note(comparison))}</p>'


def _cell(measure: Measure, cell: Cell) -> str:
    text = escape(cell_text(cell))
    if (d := cell.against_first) is None:
        return f'<td class="num word">{text}</td>'
    good = measure.more_is_better is not None and cell.is_significant
    kind = ("ok" if (d.mean > 0) == measure.more_is_better else "bad") if good else "small"
    return f'<td class="num word">{text}<br><span class="{kind}">{escape(difference_text(cell))}</span></td>'


def _differences(comparison: Comparison) -> str:
    if not comparison.differences:
        return '<p class="sub">None.</p>'
    head = "".join(f"<th>{_dot(i)}{escape(v.label)}</th>" for i, v in enumerate(comparison.variants))
    rows = "".join(
        f'<tr><td class="path">{escape(path)}</td>{"".join(f"<td>{escape(value)}</td>" for value in values)}</tr>'
        for path, values in comparison.differences.items()
    )
    return f'<div class="wrap"><table><tr><th>field</th>{head}</tr>{rows}</table></div>'


def _curves(comparison: Comparison, name: str, title: str, unit: str) -> Chart | None:
    """Each variant's mean over seeds, smoothed, with a band from the lowest to the highest seed; None where no run has the metric."""
    figure, found = base_figure("step", unit), False
    for index, variant in enumerate(comparison.variants):
        curves = [curve for run in variant.runs if (curve := _points(run.table, name))]
        if curves:
            found = True
            _add(figure, variant.label, COLORS[index % len(COLORS)], curves)
    mean = f", mean of {steps} steps" if (steps := _smoothed_steps(name)) > 1 else ""
    note = f"{name}{mean}; the band spans the seeds"
    return Chart(title=title, note=note, figure=figure) if found else None


def _smoothed_steps(name: str) -> int:
    """Validations are few and far apart, and each is a mean over all of its prompts already."""
    return 1 if name.startswith("validation/") else SMOOTH_STEPS


def _points(table: MetricsTable, name: str) -> dict[float, float]:
    """Steps that have the metric with the running mean."""
    pairs = [(float(s), v) for s, v in zip(table.steps, table.column(name), strict=False) if math.isfinite(v)]
    means = running_mean([v for _, v in pairs], _smoothed_steps(name))
    return {step: value for (step, _), value in zip(pairs, means, strict=True)}


def _add(figure: go.Figure, label: str, color: str, curves: Sequence[Mapping[float, float]]) -> None:
    steps = sorted({step for curve in curves for step in curve})
    at = [[curve[step] for curve in curves if step in curve] for step in steps]
    xs = rounded(bucket_means(steps, MAX_POINTS))
    means = rounded(bucket_means([math.fsum(v) / len(v) for v in at], MAX_POINTS))
    if len(curves) > 1:
        low, high = (rounded(bucket_means([pick(v) for v in at], MAX_POINTS)) for pick in (min, max))
        band = {"x": [*xs, *xs[::-1]], "y": [*high, *low[::-1]], "fill": "toself", "fillcolor": _faint(color), "line": {"width": 0}}
        figure.add_trace(go.Scatter(**band, name=_shortened(label), legendgroup=label, showlegend=False, hoverinfo="skip"))
    mode = "lines+markers" if len(xs) <= 30 else "lines"
    line = {"color": color, "width": 2}
    figure.add_trace(go.Scatter(x=xs, y=means, name=_shortened(label), legendgroup=label, mode=mode, marker={"size": 5}, line=line))


def _shortened(label: str) -> str:
    """For a legend, which a narrow window cuts off."""
    half = MAX_LEGEND_CHARACTERS // 2
    return label if len(label) <= MAX_LEGEND_CHARACTERS else f"{label[: half - 1]}…{label[-half:]}"


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.16)"


def _over_time(comparison: Comparison) -> Chart | None:
    """Reward of every run over wall time, which a mean over seeds would blur."""
    figure, found = base_figure("seconds since the start", "score"), False
    for index, variant in enumerate(comparison.variants):
        for place, run in enumerate(variant.runs):
            values = _points(run.table, "reward/mean")
            times = [wall_s for step, wall_s in zip(run.table.steps, run.table.wall_s, strict=True) if float(step) in values]
            if not values:
                continue
            found = True
            xs, ys = bucket_means(times, MAX_POINTS), bucket_means(list(values.values()), MAX_POINTS)
            line = {"color": COLORS[index % len(COLORS)], "width": 1.5}
            figure.add_trace(
                go.Scatter(
                    x=rounded(xs),
                    y=rounded(ys),
                    name=_shortened(variant.label),
                    legendgroup=variant.label,
                    showlegend=place == 0,
                    mode="lines",
                    line=line,
                )
            )
    note = f"reward/mean of every run, mean of {SMOOTH_STEPS} steps"
    return Chart(title="Reward over time", note=note, figure=figure) if found else None


def _script(charts: Sequence[Chart]) -> str:
    """Links the step axes: zooming one zooms all; the last chart is over time."""
    ids = [f"c{number}" for number, chart in enumerate(charts) if chart.title != "Reward over time"]
    listed = ",".join(f'"{name}"' for name in ids)
    return f"""<script>
const linked = [{listed}].map(id => document.getElementById(id));
let moving = false;
linked.forEach(one => one.on("plotly_relayout", change => {{
  if (moving) return;
  const range = change["xaxis.autorange"] ? {{"xaxis.autorange": true}}
    : "xaxis.range[0]" in change ? {{"xaxis.range": [change["xaxis.range[0]"], change["xaxis.range[1]"]]}} : null;
  if (!range) return;
  moving = true;
  Promise.all(linked.filter(other => other !== one).map(other => Plotly.relayout(other, range))).then(() => {{ moving = false; }});
}}));
</script>"""
