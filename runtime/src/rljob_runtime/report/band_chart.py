"""Draws residency bands under the lanes of a timeline: one lane a device, in it one row a worker, colored by component.

A full band: all the worker has is there. A thin one: part of it, named in the band. Hatched: state is on its way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go

from rljob_runtime.offload.plan import Device
from rljob_runtime.report.bands import Band, kinds_of
from rljob_runtime.report.jsonl import Row, number_of
from rljob_runtime.report.text import format_bytes, format_seconds

MAX_DEVICES = 16
MAX_BANDS = 1_000
"""In one chart; each takes about 350 bytes of the page."""
COLORS = ("#2f7f86", "#b5622e", "#7a5195", "#8a8530", "#b8476b", "#4a5a70")
"""Unlike those of the phases, which are drawn above."""
BROKEN_COLOR = "#9c2b2b"
_WORKER_PX = 20
_GAP_PX = 12
_FULL, _PART = 0.88, 0.64
"""Share of a worker's row that a band fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandLanes:
    """What is drawn of the bands of a window, and where."""

    bands: Sequence[Band]
    """In the order of their starts."""
    devices: Sequence[Device]
    """From top to bottom."""
    num_devices: int
    """Those that are not drawn included."""
    dropped: int
    """Bands that are not drawn although their device is."""

    @property
    def note(self) -> str:
        """What the reader should know; starts with a semicolon."""
        text = "; below, what is in the memory of each device: thin bands are part of a worker's state, hatched ones are on their way"
        if len(self.devices) < self.num_devices:
            text += f"; {len(self.devices)} of {self.num_devices} devices are drawn, switches.jsonl has all"
        if self.dropped:
            text += f"; the first {len(self.bands)} of {len(self.bands) + self.dropped} bands are drawn"
        return text

    @property
    def workers(self) -> int:
        """Most workers on one device."""
        return max(len(names) for names in _workers_of(self).values())

    @property
    def height_px(self) -> int:
        """Height of all lanes."""
        return len(self.devices) * (self.workers * _WORKER_PX + _GAP_PX)


def choose(found: Iterable[Band]) -> BandLanes | None:
    """The first devices, as many as can be drawn; None where there is nothing."""
    bands = sorted(found, key=lambda band: (band.start_s, band.worker))
    counts: dict[Device, int] = {}
    for band in bands:
        for device in band.devices:
            counts[device] = counts.get(device, 0) + 1
    if not counts:
        return None
    devices = sorted(counts)[:MAX_DEVICES]
    while len(devices) > 1 and sum(counts[device] for device in devices) > MAX_BANDS:
        devices.pop()
    mine = [band for band in bands if not set(devices).isdisjoint(band.devices)]
    drawn = mine[:MAX_BANDS]
    return BandLanes(bands=drawn, devices=devices, num_devices=len(counts), dropped=len(mine) - len(drawn))


def colors(clients: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(legend, color) by client: one each, or where colors do not suffice, one for all that differ in a number at the end only."""
    names = sorted(set(clients))
    groups = {name: name for name in names}
    if len(names) > len(COLORS):
        groups = {name: re.sub(r"[^0-9A-Za-z]*\d+$", "", name) or name for name in names}
    order = sorted(set(groups.values()))
    return {name: (group, COLORS[order.index(group) % len(COLORS)]) for name, group in groups.items()}


def add_bands(figure: go.Figure, lanes: BandLanes, window: tuple[float, float], zero_s: float, scale: float) -> None:
    """Draw on the second y axis of the figure.

    Args:
        figure: whose x axis counts from ``zero_s`` in units of 1 / ``scale`` seconds.
        lanes: what to draw.
        window: seconds; bands are cut there.
        zero_s: where the x axis begins.
        scale: units of the x axis in a second.
    """
    workers = _workers_of(lanes)
    palette = colors(band.client for band in lanes.bands)
    rows: dict[tuple[str, bool], list[tuple[Band, Device]]] = {}
    for band in lanes.bands:
        for device in sorted(set(band.devices) & set(lanes.devices)):
            rows.setdefault((palette[band.client][0], band.move is not None), []).append((band, device))
    shown = set()
    for (group, moves), mine in sorted(rows.items()):
        color = next(palette[band.client][1] for band, _ in mine)
        figure.add_trace(_trace(mine, group, color, workers, lanes, window, zero_s, scale, legend=group not in shown, moves=moves))
        shown.add(group)
    axis = {
        "tickvals": list(range(len(lanes.devices))),
        "ticktext": [str(device) for device in lanes.devices],
        "range": [len(lanes.devices) - 0.5, -0.5],
        "automargin": True,
        "zeroline": False,
        "showgrid": False,
    }
    figure.update_layout(yaxis2=axis)


def _trace(
    mine: Sequence[tuple[Band, Device]],
    group: str,
    color: str,
    workers: Mapping[Device, list[str]],
    lanes: BandLanes,
    window: tuple[float, float],
    zero_s: float,
    scale: float,
    *,
    legend: bool,
    moves: bool,
) -> go.Bar:
    row = 1 / (lanes.workers + _GAP_PX / _WORKER_PX)  # of a lane, which is 1 high
    starts = [max(band.start_s, window[0]) for band, _ in mine]
    ends = [min(band.end_s, window[1]) for band, _ in mine]
    places = [lanes.devices.index(d) + (workers[d].index(b.worker) - (len(workers[d]) - 1) / 2) * row for b, d in mine]
    fill = [BROKEN_COLOR if band.broken else color for band, _ in mine]
    hatch = {"pattern": {"shape": "/", "size": 5, "solidity": 0.35, "fillmode": "overlay", "fgcolor": color, "fgopacity": 0.9}}
    return go.Bar(
        orientation="h",
        name=f"memory of {group}",
        legendgroup=group,
        showlegend=legend,
        yaxis="y2",
        y=[round(place, 4) for place in places],
        width=[round(row * (_PART if band.partly and not moves else _FULL), 4) for band, _ in mine],
        base=[float(f"{(start - zero_s) * scale:.6g}") for start in starts],
        x=[float(f"{(end - start) * scale:.5g}") for start, end in zip(starts, ends, strict=True)],
        marker={"color": "#ffffff" if moves else fill, "line": {"width": 1 if moves else 0, "color": color}, **(hatch if moves else {})},
        text=["" if moves else _label(band) for band, _ in mine],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"size": 10, "color": "#ffffff"},
        hovertext=[_words(band, device) for band, device in mine],
        hoverinfo="text",
    )


def _workers_of(lanes: BandLanes) -> dict[Device, list[str]]:
    """By device, in the order of component and name."""
    found: dict[Device, set[tuple[str, str]]] = {device: set() for device in lanes.devices}
    for band in lanes.bands:
        for device in band.devices:
            if device in found:
                found[device].add((band.client, band.worker))
    return {device: [worker for _, worker in sorted(names)] for device, names in found.items()}


def _label(band: Band) -> str:
    if band.broken:
        return "broken"
    return ", ".join(band.kinds) if band.partly else ""


def _words(band: Band, device: Device) -> str:
    """What the mouse shows; plotly reads a little HTML."""
    name = f"<b>{escape(band.worker)}</b>"
    place = f"{device}, {format_seconds(band.end_s - band.start_s)}"
    here = ", ".join(band.kinds)
    if band.move is None:
        state = "broken, not used any more" if band.broken else here
        lines = [f"{name}: {state}", place]
        if band.before is not None:
            lines += _memory(band.before, after_only=True)
        return "<br>".join(lines)
    move = band.move
    lines = [f"{name}: {escape(str(move.get('direction')))} of {', '.join(kinds_of(move))}", place, escape(f"for {move.get('what')}")]
    copied = move.get("copied_bytes")
    elapsed_s = number_of(move, "elapsed_s")
    if isinstance(copied, dict):
        num_bytes = sum(copied.values())
        speed = f", {num_bytes / 1e9 / elapsed_s:.1f} GB/s" if num_bytes and elapsed_s > 0 else ""
        lines.append(f"{format_bytes(num_bytes)} copied, {format_bytes(_total(move.get('freed_bytes')))} freed or taken{speed}")
    lines += _memory(move, after_only=False)
    if move.get("error"):
        lines.append(f"failed: {escape(str(move['error'])[:200])}")
    return "<br>".join(lines)


def _memory(move: Row, *, after_only: bool) -> list[str]:
    before, after = move.get("before"), move.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    named = (("allocated", "allocated"), ("reserved", "reserved"), ("peak", "peak"), ("host_rss", "host RSS"), ("pinned", "pinned"))
    show = {key: (format_bytes(before[key]), format_bytes(after[key])) for key, _ in named}
    if after_only:
        return ["since the last switch", *(f"{label} {show[key][1]}" for key, label in named if key != "peak")]
    return [f"{label} {show[key][0]} → {show[key][1]}" for key, label in named]


def _total(sizes: object) -> int:
    return sum(sizes.values()) if isinstance(sizes, dict) else 0
