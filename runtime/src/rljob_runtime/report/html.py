"""``report.html``: one self-contained page about a run; plotly.js is inside, nothing is fetched.

Everything that a model, a data set or a user wrote is escaped. The words of the page are here, the charts in ``charts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from plotly.offline import get_plotlyjs

from rljob_runtime.report.charts import Chart, metric_charts, phase_chart, timeline_charts
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.display import Level, RunInfo
from rljob_runtime.report.episodes import STYLE, cut_text, episodes_html
from rljob_runtime.report.faster import advice, typical
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import Row, iter_rows, number_of, read_rows
from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.reading import shown
from rljob_runtime.report.summary import RewardWindow, RunSummary
from rljob_runtime.report.text import format_count, format_percent, format_seconds
from rljob_runtime.report.trajectories import read_trajectories, sampled_steps

MAX_EVENTS = 200

PAGE_STYLE = """
:root { --ink: #26303b; --soft: #66727f; --line: #e3e8ed; --paper: #f6f8fa; --card: #fff; --accent: #3f77b5; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 14px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 24px; margin: 0 12px 0 0; display: inline-block; }
h2 { font-size: 17px; margin: 36px 0 12px; }
h3 { font-size: 14px; margin: 0; }
h1, .sub, .failure, li { overflow-wrap: anywhere; }
.sub { color: var(--soft); margin: 2px 0 0; }
.badge { display: inline-block; padding: 2px 10px; border-radius: 99px; font-size: 13px; font-weight: 600; vertical-align: 4px; }
.succeeded { background: #e2f2e6; color: #28683c; } .failed { background: #fbe4e4; color: #9c2b2b; }
.interrupted { background: #fcefd9; color: #8a5a10; }
.failure { background: #fbe4e4; color: #7d2222; padding: 10px 14px; border-radius: 8px; margin-top: 14px; white-space: pre-wrap; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(44%, 250px), 1fr)); gap: 12px; margin-top: 20px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; min-width: 0; }
.card { overflow: hidden; }
.tile b { display: block; font-size: 22px; font-weight: 600; line-height: 1.3; } .tile span { color: var(--soft); font-size: 12.5px; }
.charts { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; } .wide { grid-column: 1 / -1; }
@media (max-width: 860px) { .charts { grid-template-columns: 1fr; } }
@media (max-width: 640px) { main { padding: 20px 12px; } table th, table td { padding: 6px; overflow-wrap: anywhere; } }
.card p { margin: 0 0 6px; color: var(--soft); font-size: 12.5px; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; background: var(--card); border: 1px solid var(--line); }
th { text-align: left; font-weight: 600; font-size: 12.5px; color: var(--soft); background: var(--paper); }
th, td { padding: 8px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
td pre, details pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
td pre, details pre { font: 12.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
td pre { max-height: 260px; overflow-y: auto; }
.num { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: #28683c; font-weight: 600; } .bad { color: #9c2b2b; font-weight: 600; }
.small { color: var(--soft); font-size: 12px; }
details { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 10px 16px; margin-top: 12px; }
summary { cursor: pointer; font-weight: 600; } details[open] summary { margin-bottom: 10px; }
.warning { color: #8a5a10; }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ink: #e3e8ee; --soft: #9aa7b5; --line: #333d48; --paper: #14181d; --card: #1c2229; --accent: #7fb0e6; }
  .ok { color: #7cc492; } .bad { color: #ec8f8f; } .warning { color: #e0b064; }
  .main-svg text:not(.bartext):not(.hoverlayer *) { fill: #c3ccd6 !important; }
  .main-svg .gridlayer path, .main-svg .xlines-above, .main-svg .ylines-above { stroke: #333d48 !important; }
}
"""


def render_report(
    info: RunInfo,
    summary: RunSummary,
    table: MetricsTable,
    *,
    spans: Sequence[Row],
    samples: Sequence[tuple[int, Sequence[Row]]],
    events: Sequence[Row],
    switches: Iterable[Row] = (),
) -> str:
    """The page as text.

    ``spans`` are rows of timeline.jsonl, ``samples`` the trajectories of some steps, ``events`` rows of logs/events.jsonl,
    ``switches`` those of switches.jsonl.
    """
    charts = metric_charts(table)
    phases = phase_chart(table)
    timeline = ([phases] if phases is not None else []) + timeline_charts(spans, switches)
    name = escape(info.job_name)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{name} - run report</title><style>{PAGE_STYLE}{STYLE}</style>",
        f"<script>{get_plotlyjs()}</script></head><body><main>",
        _head(info, summary),
        _tiles(summary),
    ]
    if charts:
        parts += ["<h2>Learning</h2>", cards(charts, "m")]
    if timeline:
        parts += ["<h2>Where the time went</h2>", _faster(advice(info.spec_yaml, typical(table))), cards(timeline, "t")]
    if samples:
        what = "Episodes" if any("turns" in row for _, rows in samples for row in rows) else "Responses"
        parts += [f"<h2>{what}</h2>", *(_samples(step, rows) for step, rows in samples)]
    if events:
        parts += ["<h2>Events</h2>", _events(events)]
    parts += ["<h2>Run</h2>", _packages(summary), f"<details><summary>Resolved spec</summary><pre>{escape(info.spec_yaml)}</pre></details>"]
    return "\n".join(parts) + "\n</main></body></html>\n"


def write_report(folder: RunFolder, info: RunInfo, summary: RunSummary, table: MetricsTable) -> None:
    """Read what the run left in its folder and write ``report.html``; about 5 MB, nearly all of it plotly.js.

    Responses are shown of the first and the last sampled step.

    Raises:
        RuntimeFault: a file of the run is malformed, or the page cannot be written.
    """
    steps = sampled_steps(folder)
    shown = sorted({steps[0], steps[-1]}) if steps else []
    page = render_report(
        info,
        summary,
        table,
        spans=read_rows(folder.timeline_jsonl),
        samples=[(step, read_trajectories(folder, step)) for step in shown],
        events=read_rows(folder.events_jsonl),
        switches=iter_rows(folder.switches_jsonl),
    )
    replace_text(folder.report_html, page, "the report")


def _faster(changes: Sequence[str]) -> str:
    if not changes:
        return ""
    items = "".join(f"<li>{escape(change)}</li>" for change in changes)
    return f'<p class="small">What would be faster, by the phases of this run:</p><ul class="small">{items}</ul>'


def _head(info: RunInfo, summary: RunSummary) -> str:
    status = summary.status.value
    facts = " · ".join(escape(t) for t in (info.model, info.algorithm, info.devices, f"seed {info.seed}"))
    failure = f'<div class="failure">{escape(summary.failure)}</div>' if summary.failure is not None else ""
    title = f'<h1>{escape(info.job_name)}</h1><span class="badge {status}">{status}</span>'
    return f'<header>{title}<p class="sub">{facts}</p>{failure}</header>'


def _window(window: RewardWindow) -> str:
    if window.first_step == window.last_step:
        return f"step {window.first_step}"
    return f"steps {window.first_step} to {window.last_step}"


def _tiles(summary: RunSummary) -> str:
    tiles = [(f"{summary.steps} / {summary.total_steps}", "steps")] if summary.total_steps else []
    windows = (("first", summary.reward_first), ("last", summary.reward_last), ("best", summary.reward_best))
    tiles += [(f"{w.mean:.3f}", f"reward, {label}: {_window(w)}") for label, w in windows if w is not None]
    if summary.pass_rate_last is not None:
        tiles.append((format_percent(summary.pass_rate_last), "pass rate, last steps"))
    if summary.validation_mean is not None:
        tiles.append((f"{summary.validation_mean:.3f}", "score of the last validation"))
    if summary.validation_pass_rate is not None:
        tiles.append((format_percent(summary.validation_pass_rate), "of its responses passed"))
    if summary.validation_unscored:
        tiles.append((str(summary.validation_unscored), "of its responses have no score"))
    split = f"start-up {format_seconds(summary.startup_s)}, training {format_seconds(summary.training_s)}"
    tiles.append((format_seconds(summary.total_s), f"in all; {split}"))
    if summary.tokens_per_s is not None and summary.tokens:
        tiles.append((format_count(summary.tokens), f"response tokens, {format_count(summary.tokens_per_s)} per second"))
    if summary.weight_version is not None:
        tiles.append((f"v{summary.weight_version}", "weight version"))
    cells = "".join(f'<div class="tile"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in tiles)
    return f'<div class="tiles">{cells}</div>'


def cards(charts: Sequence[Chart], prefix: str) -> str:
    """Charts in boxes, two beside each other where there is room; ``prefix`` makes their ids unique in the page."""
    config = {"displaylogo": False, "responsive": True, "displayModeBar": False}  # dragging zooms, a double click goes back
    boxes = []
    for number, chart in enumerate(charts):
        plot = chart.figure.to_html(full_html=False, include_plotlyjs=False, config=config, div_id=f"{prefix}{number}")
        kind = "card wide" if chart.wide else "card"
        boxes.append(f'<section class="{kind}"><h3>{escape(chart.title)}</h3><p>{escape(chart.note)}</p>{plot}</section>')
    return '<div class="charts">' + "\n".join(boxes) + "</div>"


def _samples(step: int, rows: Sequence[Row]) -> str:
    file_name = f"trajectories/step-{step:06d}.jsonl"
    title = f'<h3 style="margin:14px 0 8px">Step {step} <span class="small">best to worst, from {file_name}</span></h3>'
    episodes = [trajectory for row in rows if (trajectory := shown(row)).is_episode]
    if episodes:
        return title + episodes_html(episodes, file_name)
    body = "".join(_sample(row, file_name) for row in rows)
    head = '<th style="width:32%">Prompt</th><th>Response</th><th style="width:14%">Reference</th><th style="width:15%">Judgement</th>'
    return f"{title}<table><tr>{head}</tr>{body}</table>"


def _sample(row: Row, file_name: str) -> str:
    error, passed, parts = row.get("error"), row.get("passed"), row.get("parts")
    if row.get("reward") is None:
        verdict = f'<span class="bad">no reward</span><br><span class="small">{escape(str(error))}</span>'
    elif error is not None:  # the score is that of onError or onTimeout
        verdict = f'<span class="bad">{number_of(row, "reward"):.3g} failed</span><br><span class="small">{escape(str(error))}</span>'
    else:
        verdict = f'<span class="{"ok" if passed else "bad"}">{number_of(row, "reward"):.3g} {"passed" if passed else "not passed"}</span>'
    facts = [f"{name} {number_of(parts, name):.3g}" for name in parts] if isinstance(parts, dict) else []
    first, last = row.get("version_first"), row.get("version_last")
    facts.append(f"{row.get('response_tokens')} tokens, {row.get('finish_reason')}")
    facts.append(f"sampled by v{first}" if first == last else f"sampled by v{first} to v{last}")
    if row.get("logprob_mean") is not None:
        facts.append(f"mean log-prob {number_of(row, 'logprob_mean'):.2f} nats")
    notes = "<br>".join(escape(str(f)) for f in facts)
    notes += "".join(f"<br>{escape(name)} said:<br>{cut_text(text, file_name)}" for name, text in shown(row).judgements)
    cells = "".join(f"<td>{cut_text(str(row.get(key)), file_name)}</td>" for key in ("prompt", "response", "answer"))
    return f'<tr>{cells}<td>{verdict}<br><span class="small">{notes}</span></td></tr>'


def _events(rows: Sequence[Row]) -> str:
    dropped = len(rows) - MAX_EVENTS
    more = f"<p class='small'>the last {MAX_EVENTS} of {len(rows)}; logs/events.jsonl has all</p>" if dropped > 0 else ""
    lines = "".join(
        f'<tr><td class="num" style="width:90px">{format_seconds(number_of(row, "wall_s"))}</td>'
        f'<td class="{"warning" if row.get("level") == Level.WARNING else ""}">{escape(str(row.get("text")))}</td></tr>'
        for row in rows[-MAX_EVENTS:]
    )
    return f"{more}<table>{lines}</table>"


def _packages(summary: RunSummary) -> str:
    return '<p class="sub">' + escape(", ".join(f"{name} {version}" for name, version in summary.packages.items())) + "</p>"
