"""A timeline as one self-contained HTML page: a lane per worker, residency bands below its phases, bubbles with their cause.

Nothing is loaded from elsewhere. The drawing is a canvas: a run has too many spans for as many elements; the table below it says in words
what matters most, for whoever cannot see the canvas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape

from rljob_api.errors import counted
from rljob_runtime.report.text import format_percent, format_seconds
from rljob_runtime.report.timeline import Lane, Timeline
from rljob_runtime.report.timeline_script import SCRIPT

COLORS = {
    "generate": "#5b8fc7",
    "environment": "#3f9a94",
    "reward": "#e0a458",
    "score": "#c46a78",
    "train": "#5fa06d",
    "sync": "#9a83c4",
    "validate": "#b78fb5",
    "checkpoint": "#8a939d",
    "offload": "#b5622e",
    "load": "#2f7f86",
    "start": "#7a8793",
}
"""As in the report's charts, where it has the phase."""
OTHER_COLOR = "#7a8793"

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--dim:#5f6b7a;--line:#d0d7de;--page:#f3f5f7;--card:#fff;--wait:#e4e8ec;--waitline:#b9c2cb;
--band:#dfe7ee;--bandmove:#c3ced8}
@media(prefers-color-scheme:dark){:root{--ink:#e3e8ee;--dim:#98a5b3;--line:#36414d;--page:#0c1014;--card:#12171d;--wait:#20272f;
--waitline:#465260;--band:#263340;--bandmove:#3b4c5d}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1400px;margin:0 auto;padding:24px 20px 48px}h1{font-size:22px;margin:0}h2{font-size:16px;margin:0 0 10px}
.lead{color:var(--dim);margin:4px 0 16px}section{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0 0 18px;
padding:16px 18px;overflow-x:auto}.bar{display:flex;flex-wrap:wrap;gap:6px 14px;align-items:center;margin:0 0 10px}
button{font:inherit;color:inherit;background:var(--page);border:1px solid var(--line);border-radius:6px;padding:2px 12px;cursor:pointer}
button:focus-visible,canvas:focus-visible{outline:2px solid #5b8fc7;outline-offset:1px}
.key{display:inline-flex;align-items:center;gap:6px;font-size:13px}.key i{width:12px;height:12px;border-radius:3px;display:inline-block}
canvas{display:block;width:100%;touch-action:pan-y;cursor:grab}.hint{color:var(--dim);font-size:12.5px;margin:8px 0 0}
#tip{position:fixed;z-index:2;pointer-events:none;display:none;max-width:min(420px,90vw);
background:var(--card);border:1px solid var(--line);
border-radius:6px;padding:6px 10px;font-size:13px;box-shadow:0 2px 10px #0003}
table{border-collapse:collapse;width:100%}th{color:var(--dim);font-weight:600;text-align:left;white-space:nowrap}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}tr:last-child td{border-bottom:0}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.name{white-space:nowrap}
@media(max-width:640px){main{padding:14px 10px}section{padding:12px}th,td{padding-right:8px;font-size:12.5px}
td{overflow-wrap:anywhere}.name{white-space:normal;min-width:88px}th{white-space:normal}}
"""


def page(timeline: Timeline) -> str:
    """The page's text."""
    name = escape(timeline.name)
    steps = (
        f"step {timeline.first_step}"
        if timeline.first_step == timeline.last_step
        else f"steps {timeline.first_step} to {timeline.last_step}"
    )
    length_s = timeline.end_s - timeline.start_s
    lead = f"{steps} of {timeline.steps_in_run}, {format_seconds(length_s)}; {counted(len(timeline.lanes) - 1, 'worker')}"
    data = json.dumps(_data(timeline), separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
            f'<title>{name}: timeline</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>',
            f'<body><main><h1>{name}</h1><p class="lead">{escape(lead)}</p>',
            f'<section><div class="bar">{_legend(timeline)}</div>',
            '<div class="bar"><button id="in">Zoom in</button><button id="out">Zoom out</button><button id="all">All</button></div>',
            '<canvas id="lanes" tabindex="0" role="img" aria-label="Phases of workers over time; the table below has the waits"></canvas>',
            '<p class="hint">Drag to move; Ctrl and the wheel, or + and -, to zoom; hover over a bar for its length and cause.</p>',
            f'</section>{_waits(timeline)}</main><div id="tip" role="status"></div>',
            f'<script type="application/json" id="data">{data}</script><script>{SCRIPT}</script></body></html>\n',
        )
    )


def _legend(timeline: Timeline) -> str:
    phases = list(dict.fromkeys(span.phase for lane in timeline.lanes for span in lane.spans if span.phase != "wait"))
    known = [phase for phase in COLORS if phase in phases]
    keys = [(phase, COLORS.get(phase, OTHER_COLOR)) for phase in (*known, *(p for p in phases if p not in COLORS))]
    keys.append(("wait", "var(--waitline)"))
    if any(lane.bands for lane in timeline.lanes):
        keys.append(("in the memory of its devices", "var(--bandmove)"))
    return "".join(f'<span class="key"><i style="background:{color}"></i>{escape(phase)}</span>' for phase, color in keys)


def _data(timeline: Timeline) -> dict[str, object]:
    """What the script renders: times relative to the first span, texts once."""
    texts: dict[str, int] = {}

    def index(text: str) -> int:
        return texts.setdefault(text, len(texts))

    zero_s = timeline.start_s
    lanes = [
        {
            "name": lane.name,
            "spans": [
                [index(s.phase), round(s.start_s - zero_s, 6), round(s.end_s - zero_s, 6), s.step, index(s.note)] for s in lane.spans
            ],
            "bands": _bands(lane, zero_s, timeline.end_s, index),
        }
        for lane in timeline.lanes
    ]
    return {"lanes": lanes, "texts": list(texts), "colors": COLORS, "other": OTHER_COLOR, "end": round(timeline.end_s - zero_s, 6)}


def _bands(lane: Lane, zero_s: float, end_s: float, index: Callable[[str], int]) -> list[list[object]]:
    """Start, end, what, whether it is on its way, whether it is a part of the worker's state."""
    return [
        [
            round(max(band.start_s - zero_s, 0.0), 6),
            round(min(band.end_s, end_s) - zero_s, 6),
            index("broken" if band.broken else ", ".join(band.kinds)),
            int(band.move is not None),
            int(band.partly),
        ]
        for band in lane.bands
    ]


def _waits(timeline: Timeline) -> str:
    """By worker the causes of its waits, longest first."""
    length_s = timeline.end_s - timeline.start_s
    rows = [
        (name, cause, seconds)
        for name, causes in timeline.waited_s().items()
        for cause, seconds in sorted(causes.items(), key=lambda item: -item[1])
    ]
    if not rows:
        return ""
    body = "".join(
        f'<tr><td class="name">{escape(name)}</td><td>{escape(cause)}</td><td class="num">{format_seconds(seconds)}</td>'
        f'<td class="num">{format_percent(seconds / length_s)}</td></tr>'
        for name, cause, seconds in rows
    )
    head = '<th>worker</th><th>why</th><th class="num">waited</th><th class="num">of the time</th>'
    return f"<section><h2>What workers waited for</h2><table><tr>{head}</tr>{body}</table></section>"
