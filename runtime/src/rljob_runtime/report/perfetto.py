"""A timeline as a trace for https://ui.perfetto.dev and chrome://tracing: JSON objects of the Trace Event Format.

A worker is a process of the trace. Its phases, bubbles and residency are threads of it; spans that overlap get further threads, because
slices of one thread have to nest.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rljob_runtime.report.timeline import Lane, Span, Timeline

Event = dict[str, object]


def trace(timeline: Timeline) -> str:
    """The trace as JSON text; times are microseconds since the run was first started."""
    events: list[Event] = []
    for pid, lane in enumerate(timeline.lanes, start=1):
        title = f"{lane.name} ({lane.devices})" if lane.devices else lane.name
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        events += _threads(pid, lane)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), ensure_ascii=False) + "\n"


def rows_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans spread over rows in which none overlap, as few rows as that takes."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        free = next((row for row in rows if row[-1].end_s <= span.start_s), None)
        if free is None:
            rows.append([span])
        else:
            free.append(span)
    return rows


def _threads(pid: int, lane: Lane) -> list[Event]:
    busy = [span for span in lane.spans if span.phase != "wait"]
    waits = [span for span in lane.spans if span.phase == "wait"]
    named = [("phases" if index == 0 else f"phases {index + 1}", row) for index, row in enumerate(rows_of(busy))]
    if waits:
        named.append(("waits", waits))
    if lane.bands:
        named.append(("on its devices", [_resident(lane, index) for index in range(len(lane.bands))]))
    events: list[Event] = []
    for tid, (title, spans) in enumerate(named, start=1):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": title}})
        events += _slices(pid, tid, spans)
    return events


def _resident(lane: Lane, index: int) -> Span:
    band = lane.bands[index]
    words = "broken" if band.broken else ", ".join(band.kinds)
    return Span(phase=words, start_s=band.start_s, end_s=band.end_s, step=0, note="on its way" if band.move is not None else "")


def _slices(pid: int, tid: int, spans: Sequence[Span]) -> list[Event]:
    return [
        {
            "ph": "X",
            "name": span.phase,
            "cat": "wait" if span.phase == "wait" else "phase",
            "pid": pid,
            "tid": tid,
            "ts": round(span.start_s * 1e6, 1),
            "dur": round((span.end_s - span.start_s) * 1e6, 1),
            "args": {"step": span.step, **({"note": span.note} if span.note else {})},
        }
        for span in spans
    ]
