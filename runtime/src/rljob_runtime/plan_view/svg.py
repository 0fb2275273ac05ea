"""The picture as SVG text: nodes are boxes, devices columns, components colored bands; below them the weight sync as arrows.

Hand-written and small: no library, no script, no font files. Colors follow the reader's light or dark theme. Every band has a
hover title; the picture has a title and a description for screen readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rljob_api.placement.topology import ACCELERATOR
from rljob_api.planning.sync_routes import Transport
from rljob_runtime.plan_view.grid import Grid
from rljob_runtime.plan_view.layout import CPU, Band, Block, Panel, blocks, component_facts
from rljob_runtime.plan_view.palette import PALETTE
from rljob_runtime.plan_view.routes import TRANSPORT_WORDS, Arrow, End, Flow, Route, flow
from rljob_runtime.plan_view.words import clip, count, ranges, short_ranges

WIDTH = 1_000
"""Size of the picture, in its own units; a browser scales it to the room there is."""
MAX_CELLS = 640
"""Bands and columns that are drawn; nodes beyond are counted."""
_MARGIN = 24
_ROW = 30
_BAND = 24
_GAP = 3
_PAD = 12
_TITLE = 46
_STACK = 8
"""How far the nodes behind a folded one look out."""
_MIN_CELL = 34
_MAX_CELL = 68
_CHAR = 7.4
"""Width of an average character at 13 units; generous, so that text never leaves its box."""

_STYLE = """
.pv{font:13px system-ui,-apple-system,"Segoe UI",sans-serif}
.pv-bg{fill:#fff}.pv text{fill:#1f2933}.pv .pv-dim{fill:#5f6b7a}.pv-h{font-size:15px;font-weight:600}.pv-b{font-weight:600}
.pv-s{font-size:11.5px}.pv-m{text-anchor:middle}
.pv-node{fill:#f6f8fa;stroke:#d0d7de}.pv-track{fill:#e6eaef}.pv-free{fill:none;stroke:#9aa5b1;stroke-dasharray:2 3}
.pv-r{fill:none;stroke-width:2}.pv-r0{stroke:#00805d}.pv-r1{stroke:#0072b2;stroke-dasharray:7 4}.pv-r2{stroke:#c04f00;stroke-dasharray:2 4}
.pv-r3{stroke:#8a4f9e;stroke-dasharray:7 3 2 3}.pv-a3{fill:#8a4f9e}
.pv-a0{fill:#00805d}.pv-a1{fill:#0072b2}.pv-a2{fill:#c04f00}
@media(prefers-color-scheme:dark){.pv-bg{fill:#12171d}.pv text{fill:#e3e8ee}.pv .pv-dim{fill:#98a5b3}.pv-node{fill:#1a2129;stroke:#36414d}
.pv-track{fill:#262f39}.pv-free{stroke:#6b7885}.pv-r0{stroke:#2fc49a}.pv-r1{stroke:#56b4e9}.pv-r2{stroke:#ff8a3c}
.pv-a0{fill:#2fc49a}.pv-a1{fill:#56b4e9}.pv-a2{fill:#ff8a3c}
.pv-r3{stroke:#cc92de}.pv-a3{fill:#cc92de}}
"""


def svg(grid: Grid, name: str, routes: Sequence[Route] = ()) -> str:
    """A standalone SVG document, which may also stand inside an HTML page (once).

    ``name`` is the job's. The size is bounded whatever the plan's: see :mod:`rljob_runtime.plan_view.layout`.
    """
    canvas = _Canvas()
    drawn = blocks(grid, MAX_CELLS)
    gutter = _gutter(grid, drawn)
    for block in drawn:
        _block(canvas, block, grid, gutter)
    if routes:
        _sync(canvas, grid, flow(grid, routes))
    height = round(canvas.y + _MARGIN / 2)
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
            ' class="pv" role="img" aria-labelledby="pv-title pv-desc">',
            f'<title id="pv-title">{escape(f"Placement of {name}")}</title>',
            f'<desc id="pv-desc">{escape(_description(grid))}</desc>',
            f"<style>{_STYLE}{_component_style(grid)}</style>",
            f"<defs>{''.join(_markers())}</defs>",
            f'<rect class="pv-bg" width="{WIDTH}" height="{height}" rx="6"/>',
            *canvas.parts,
            "</svg>\n",
        )
    )


class _Canvas:
    """Elements so far and how far down they reach."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y: float = _MARGIN

    def add(self, *parts: str) -> None:
        self.parts += parts

    def text(self, x: float, y: float, text: str, classes: str = "") -> None:
        shown = f' class="{classes}"' if classes else ""
        self.add(f'<text x="{_n(x)}" y="{_n(y)}"{shown}>{escape(text)}</text>')


def _n(value: float) -> str:
    """A coordinate with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0")


def _wide(text: str) -> float:
    return len(text) * _CHAR


def _fit(text: str, width: float) -> str:
    return clip(text, max(int(width / _CHAR), 1))


def _description(grid: Grid) -> str:
    groups = "; ".join(f"{group.name}: {count(group.num_nodes, 'node')}, {count(group.num_devices, 'device')}" for group in grid.groups)
    components = "; ".join(f"{component.name}: {clip(component_facts(component), 160)}" for component in grid.components)
    return f"{grid.mode}. {groups}. {components}."


def _component_style(grid: Grid) -> str:
    used = range(min(len(grid.components), len(PALETTE)))
    return "".join(f".pv-c{i}{{fill:{PALETTE[i].fill}}}.pv text.pv-t{i}{{fill:{PALETTE[i].ink}}}" for i in used) + "\n"


def _markers() -> Iterator[str]:
    for index in range(len(Transport)):
        yield (
            f'<marker id="pv-arrow-{index}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"'
            f' markerUnits="userSpaceOnUse"><path class="pv-a{index}" d="M0 0 8 4 0 8z"/></marker>'
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strip:
    """Columns of a panel that fit side by side."""

    panel: Panel
    columns: range
    cell: float
    """Width of a column."""
    title: str
    subtitle: str

    @property
    def width(self) -> float:
        """Of the node's box."""
        return max(len(self.columns) * (self.cell + _GAP) - _GAP, _wide(self.title) * 1.15, _wide(self.subtitle) * 0.9) + 2 * _PAD


def _gutter(grid: Grid, drawn: Sequence[Block]) -> float:
    """Room for the names of components, the same beside every node."""
    names = (grid.components[component].name for block in drawn for component in block.components)
    return min(max(map(_wide, names), default=0.0) + 12, 250)


def _block(canvas: _Canvas, block: Block, grid: Grid, gutter: float) -> None:
    canvas.text(_MARGIN, canvas.y + 12, block.group.name, "pv-h")
    name_width = len(block.group.name) * 9 + 12
    canvas.text(_MARGIN + name_width, canvas.y + 12, _fit(block.title, WIDTH - 2 * _MARGIN - name_width), "pv-dim")
    canvas.y += 26
    room = WIDTH - 2 * _MARGIN - gutter - _STACK
    for row in _rows(_strips(block.panels, room), room):
        _row(canvas, row, block, grid, gutter)
    canvas.y += _STACK if any(panel.is_folded for panel in block.panels) else 0
    for note in block.notes:
        canvas.text(_MARGIN, canvas.y + 12, _fit(note, WIDTH - 2 * _MARGIN), "pv-dim")
        canvas.y += 20
    canvas.y += 20


def _strips(panels: Sequence[Panel], room: float) -> Iterator[_Strip]:
    cell = _cell_width(panels)
    fitting = max(1, int((room - 2 * _PAD + _GAP) / (cell + _GAP)))
    step = fitting // 8 * 8 or fitting
    for panel in panels:
        number = len(panel.columns)
        chunks = [range(number)] if number <= fitting else [range(i, min(i + step, number)) for i in range(0, number, step)]
        for chunk in chunks:
            devices = range(panel.first_device, panel.first_device + panel.num_devices)
            part = "" if len(chunks) == 1 else f", part {chunks.index(chunk) + 1} of {len(chunks)}"
            yield _Strip(
                panel=panel,
                columns=chunk,
                cell=cell,
                title=f"node {panel.node_rank}{part}",
                subtitle=f"devices {ranges(devices)}" if devices else "",
            )


def _cell_width(panels: Sequence[Panel]) -> float:
    """Wide enough for every label, within bounds."""
    widest = 0.0
    for panel in panels:
        labels = [(len(column.label) * 0.9, 1) for column in panel.columns]
        labels += [(len(band.label), band.end - band.start + 1) for bands in panel.bands.values() for band in bands]
        widest = max(widest, *(chars * _CHAR / number for chars, number in labels), 0.0)
    return min(max(widest + 12, _MIN_CELL), _MAX_CELL)


def _rows(strips: Iterable[_Strip], room: float) -> Iterator[list[_Strip]]:
    row: list[_Strip] = []
    used = 0.0
    for strip in strips:
        width = strip.width + (_STACK if strip.panel.is_folded else 0)
        if row and used + _PAD + width > room:
            yield row
            row, used = [], 0.0
        used += width + (_PAD if row else 0)
        row.append(strip)
    if row:
        yield row


def _row(canvas: _Canvas, strips: Sequence[_Strip], block: Block, grid: Grid, gutter: float) -> None:
    here = [component for component in block.components if any(component in strip.panel.bands for strip in strips)]
    top = canvas.y + _TITLE + 14
    for position, component in enumerate(here):
        name = grid.components[component].name
        y = top + position * _ROW + 17
        canvas.add(f'<text x="{_MARGIN}" y="{_n(y)}">{escape(_fit(name, gutter - 8))}<title>{escape(name)}</title></text>')
    height = _TITLE + 14 + max(len(here), 1) * _ROW + 4
    x = _MARGIN + gutter
    for strip in strips:
        for behind in (_STACK, _STACK // 2, 0) if strip.panel.is_folded else (0,):
            corner = f'x="{_n(x + behind)}" y="{_n(canvas.y + behind)}"'
            canvas.add(f'<rect class="pv-node" {corner} width="{_n(strip.width)}" height="{height}" rx="8"/>')
        canvas.text(x + _PAD, canvas.y + 20, strip.title, "pv-b")
        if strip.subtitle:
            canvas.text(x + _PAD, canvas.y + 35, strip.subtitle, "pv-dim pv-s")
        _columns(canvas, strip, x + _PAD, top, max(len(here), 1))
        for position, component in enumerate(here):
            for band in strip.panel.bands.get(component, ()):
                _band(canvas, strip, band, x + _PAD, top + position * _ROW, component, grid)
        x += strip.width + _PAD + (_STACK if strip.panel.is_folded else 0)
    canvas.y += height + _PAD


def _columns(canvas: _Canvas, strip: _Strip, x: float, top: float, num_rows: int) -> None:
    """Head and track of every column; a device nobody uses gets a dashed frame."""
    for position, index in enumerate(strip.columns):
        left = x + position * (strip.cell + _GAP)
        column = strip.panel.columns[index]
        canvas.text(left + strip.cell / 2, top - 4, _fit(column.label, strip.cell * 1.15), "pv-dim pv-s pv-m")
        classes = "pv-free" if index in strip.panel.free else "pv-track"
        hover = f"<title>{escape(column.label)}: free</title>" if index in strip.panel.free else ""
        canvas.add(
            f'<rect class="{classes}" x="{_n(left)}" y="{_n(top)}" width="{_n(strip.cell)}" height="{num_rows * _ROW - 6}" rx="4"'
            + (f">{hover}</rect>" if hover else "/>")
        )


def _band(canvas: _Canvas, strip: _Strip, band: Band, x: float, y: float, component: int, grid: Grid) -> None:
    start, end = max(band.start, strip.columns.start), min(band.end, strip.columns.stop - 1)
    if start > end:
        return
    left = x + (start - strip.columns.start) * (strip.cell + _GAP)
    width = (end - start + 1) * (strip.cell + _GAP) - _GAP
    tone = component % len(PALETTE)
    canvas.add(
        f"<g><title>{escape(_hover(strip.panel, band, grid.components[component].name))}</title>"
        f'<rect class="pv-c{tone}" x="{_n(left)}" y="{_n(y)}" width="{_n(width)}" height="{_BAND}" rx="5"/>'
        f'<text class="pv-m pv-t{tone}" x="{_n(left + width / 2)}" y="{_n(y + 17)}">{escape(_fit(band.label, width))}</text></g>'
    )


def _hover(panel: Panel, band: Band, name: str) -> str:
    """For example ``actor_infer 0 on node 0, devices 4-5``."""
    first, last = panel.columns[band.start], panel.columns[band.end]
    who = f"{name} {short_ranges(band.ranks, 40)} on node {panel.node_rank}"
    if first.kind == CPU:
        return f"{who}: {count(len(band.ranks), 'CPU process')}"
    kind = "device" if first.kind == ACCELERATOR else first.kind
    return f"{who}, {kind} {first.first}" if first.first == last.last else f"{who}, {kind}s {first.first}-{last.last}"


_BOX_WIDTH = 330
_BOX_HEIGHT = 40
_BOX_STEP = 50
_LANE = 10
"""Between arrows that join the same boxes."""


def _sync(canvas: _Canvas, grid: Grid, bundled: Flow) -> None:
    """Senders on the left, receivers on the right, arrows by transport between them."""
    canvas.text(_MARGIN, canvas.y + 12, "Weight sync", "pv-h")
    _sync_legend(canvas, bundled)
    canvas.y += 30
    height = max(len(bundled.sources), len(bundled.targets)) * _BOX_STEP
    right = WIDTH - _MARGIN - _BOX_WIDTH
    middles: list[list[float]] = []
    for x, boxes in ((_MARGIN, bundled.sources), (right, bundled.targets)):
        free = (height - len(boxes) * _BOX_STEP) / (len(boxes) + 1)
        middles.append([canvas.y + free * (i + 1) + _BOX_STEP * i + _BOX_HEIGHT / 2 for i in range(len(boxes))])
        for end, middle in zip(boxes, middles[-1], strict=True):
            _box(canvas, grid, end, x, middle)
    beside = Counter((arrow.source, arrow.target) for arrow in bundled.arrows)
    lanes: Counter[tuple[int, int]] = Counter()
    for arrow in bundled.arrows:
        ends = arrow.source, arrow.target
        shift = (lanes[ends] - (beside[ends] - 1) / 2) * _LANE
        lanes[ends] += 1
        _arrow(canvas, arrow, middles[0][arrow.source] + shift, middles[1][arrow.target] + shift, right)
    canvas.y += height + 8


def _sync_legend(canvas: _Canvas, bundled: Flow) -> None:
    x = _MARGIN + 130.0
    order = list(Transport)
    for transport, number in bundled.totals_of():
        index, text = order.index(transport), f"{TRANSPORT_WORDS[transport]}: {count(number, 'route')}"
        canvas.add(f'<path class="pv-r pv-r{index}" d="M{_n(x)} {_n(canvas.y + 8)}h36"/>')
        canvas.text(x + 44, canvas.y + 12, text, "pv-dim")
        x += 70 + _wide(text)


def _box(canvas: _Canvas, grid: Grid, end: End, x: float, middle: float) -> None:
    name = grid.components[end.component].name
    tone = end.component % len(PALETTE)
    top = middle - _BOX_HEIGHT / 2
    ranks = f" {short_ranges(end.ranks, 14)}"
    where = _fit(end.where, 120)
    title = _fit(name, _BOX_WIDTH - 40 - _wide(ranks) - _wide(where)) + ranks
    canvas.add(
        f"<g><title>{escape(f'{name}{ranks}, {end.where}')}</title>"
        f'<rect class="pv-node" x="{_n(x)}" y="{_n(top)}" width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>'
        f'<rect class="pv-c{tone}" x="{_n(x)}" y="{_n(top)}" width="10" height="{_BOX_HEIGHT}" rx="4"/>'
        f'<text class="pv-b" x="{_n(x + 20)}" y="{_n(middle + 5)}">{escape(title)}</text>'
        f'<text class="pv-dim" text-anchor="end" x="{_n(x + _BOX_WIDTH - 12)}" y="{_n(middle + 5)}">{escape(where)}</text></g>'
    )


def _arrow(canvas: _Canvas, arrow: Arrow, start: float, end: float, right: float) -> None:
    index = list(Transport).index(arrow.transport)
    left = _MARGIN + _BOX_WIDTH + 2
    middle = (left + right) / 2
    text = f"{count(arrow.num_routes, 'route')}, {TRANSPORT_WORDS[arrow.transport]}"
    canvas.add(
        f'<path class="pv-r pv-r{index}" marker-end="url(#pv-arrow-{index})"'
        f' d="M{left} {_n(start)}C{_n(middle)} {_n(start)} {_n(middle)} {_n(end)} {_n(right - 3)} {_n(end)}">'
        f"<title>{escape(text)}</title></path>"
    )
