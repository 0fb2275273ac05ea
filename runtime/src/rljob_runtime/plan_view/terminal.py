"""The picture for a terminal: lines of spans, each with a tone that the caller may color. It reads as well without color."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rljob_api.placement.topology import ACCELERATOR
from rljob_runtime.plan_view.grid import Grid
from rljob_runtime.plan_view.layout import CPU, Band, Block, Panel, blocks, component_facts
from rljob_runtime.plan_view.routes import Route, sentences
from rljob_runtime.plan_view.words import clip

MIN_WIDTH = 40
"""Columns of a terminal below which lines may be cut off."""
MAX_CELLS = 320
"""Boxes and columns that are drawn; nodes beyond are counted."""
_INDENT = "  "
_PANEL_GAP = "   "
_MIN_FACTS = 32
"""Characters below which what is said of a component stands under its name."""


class Tone(StrEnum):
    """What a span is, for coloring."""

    PLAIN = "plain"
    DIM = "dim"
    BOLD = "bold"
    COMPONENT = "component"
    """Belongs to :attr:`Span.component`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A piece of a line."""

    text: str
    tone: Tone = Tone.PLAIN
    component: int = 0
    """Index into :attr:`Grid.components` where the tone is COMPONENT."""


Line = tuple[Span, ...]
"""One line, without the line break."""


def picture(grid: Grid, width: int, routes: Sequence[Route] = ()) -> tuple[Line, ...]:
    """Blocks of node groups, the components, the sync routes; no line is longer than ``width`` (at least 40) characters."""
    width = max(width, MIN_WIDTH)
    lines: list[Line] = []
    drawn = blocks(grid, MAX_CELLS)
    names = (grid.components[component].name for block in drawn for component in block.components)
    label_width = min(max(map(len, names), default=len("free")), max(10, width // 3))
    for block in drawn:
        lines += [*_block(block, grid, width, label_width), ()]
    lines += _components(grid, width)
    if routes:
        totals, sent = sentences(grid, routes)
        lines += [(), _heading("Weight sync", totals, width)]
        for sentence in sent:
            lines += _wrapped(sentence, width, Tone.PLAIN)
    return tuple(lines)


def plain(lines: Iterable[Line]) -> str:
    """The lines as text without color, spaces at line ends removed."""
    return "".join("".join(span.text for span in line).rstrip() + "\n" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strip:
    """Columns of one panel that fit side by side."""

    panel: Panel
    title: str
    columns: range
    widths: dict[int, int]
    """Characters of each column."""

    @property
    def width(self) -> int:
        """Characters with the gaps between its columns."""
        return max(sum(self.widths.values()) + len(self.columns) - 1, len(self.title))


def _block(block: Block, grid: Grid, width: int, label_width: int) -> Iterator[Line]:
    yield _heading(block.group.name, block.title, width)
    room = width - len(_INDENT) - label_width - 2
    for row in _rows(_strips(block.panels, room), room):
        yield from _row(row, block, grid, label_width)
    for note in block.notes:
        yield from _wrapped(note, width, Tone.DIM)


def _heading(name: str, rest: str, width: int) -> Line:
    return (Span(text=name, tone=Tone.BOLD), Span(text=clip(f"  {rest}", width - len(name)), tone=Tone.DIM))


def _wrapped(text: str, width: int, tone: Tone) -> list[Line]:
    lines = textwrap.wrap(text, width, initial_indent=_INDENT, subsequent_indent=_INDENT * 2, break_on_hyphens=False)
    return [(Span(text=line, tone=tone),) for line in lines]


def _column_widths(panels: Sequence[Panel]) -> dict[str, int]:
    """Characters of a column by kind, so that every label fits into its band."""
    widths: dict[str, int] = {}
    for panel in panels:
        for column in panel.columns:
            widths[column.kind] = max(widths.get(column.kind, 3), len(column.label))
        for bands in panel.bands.values():
            for band in bands:
                number = band.end - band.start + 1
                needed = -(-(len(band.label) + 2 - (number - 1)) // number)
                kind = panel.columns[band.start].kind
                widths[kind] = max(widths[kind], needed)
    return widths


def _strips(panels: Sequence[Panel], room: int) -> Iterator[_Strip]:
    widths = _column_widths(panels)
    for panel in panels:
        of_column = [min(widths[column.kind], room) for column in panel.columns]
        chunks = list(_chunks(of_column, room))
        for chunk in chunks:
            title = f"node {panel.node_rank}"
            if len(chunks) > 1 and panel.columns[chunk[0]].kind == ACCELERATOR:
                last = max(index for index in chunk if panel.columns[index].kind == ACCELERATOR)
                title += f": {panel.columns[chunk[0]].first}-{panel.columns[last].last}"
            yield _Strip(panel=panel, title=clip(title, room), columns=chunk, widths={index: of_column[index] for index in chunk})


def _chunks(widths: Sequence[int], room: int) -> Iterator[range]:
    """Columns that fit into the room; whole multiples of 8 (or 4) columns where a node has to be cut."""
    if not widths or sum(widths) + len(widths) - 1 <= room:
        yield range(len(widths))
        return
    fitting = max(1, (room + 1) // (max(widths) + 1))
    step = next((fitting // unit * unit for unit in (8, 4) if fitting >= unit), fitting)
    for start in range(0, len(widths), step):
        yield range(start, min(start + step, len(widths)))


def _rows(strips: Iterable[_Strip], room: int) -> Iterator[list[_Strip]]:
    """Strips side by side as long as they fit."""
    row: list[_Strip] = []
    used = 0
    for strip in strips:
        if row and used + len(_PANEL_GAP) + strip.width > room:
            yield row
            row, used = [], 0
        used += strip.width + (len(_PANEL_GAP) if row else 0)
        row.append(strip)
    if row:
        yield row


def _row(strips: Sequence[_Strip], block: Block, grid: Grid, label_width: int) -> Iterator[Line]:
    indent = Span(text=_INDENT + " " * (label_width + 2))
    yield (indent, Span(text=_PANEL_GAP.join(strip.title.ljust(strip.width) for strip in strips), tone=Tone.BOLD))
    yield (indent, Span(text=_PANEL_GAP.join(_header(strip).ljust(strip.width) for strip in strips), tone=Tone.DIM))
    drawn = False
    for component in block.components:
        cells = [list(_cells(strip, component)) for strip in strips]
        if not any(span.tone is Tone.COMPONENT for spans in cells for span in spans):
            continue
        drawn = True
        label = clip(grid.components[component].name, label_width).ljust(label_width + 2)
        yield (Span(text=_INDENT + label), *_joined(strips, cells))
    if not drawn and any(strip.panel.free for strip in strips):
        yield (Span(text=_INDENT + "free".ljust(label_width + 2), tone=Tone.DIM), *_joined(strips, [list(_cells(s, -1)) for s in strips]))


def _header(strip: _Strip) -> str:
    return " ".join(strip.panel.columns[index].label.center(strip.widths[index]) for index in strip.columns)


def _joined(strips: Sequence[_Strip], cells: Sequence[Sequence[Span]]) -> Iterator[Span]:
    for position, (strip, spans) in enumerate(zip(strips, cells, strict=True)):
        yield from spans
        if position < len(strips) - 1:
            yield Span(text=" " * (strip.width - sum(len(span.text) for span in spans)) + _PANEL_GAP)


def _cells(strip: _Strip, component: int) -> Iterator[Span]:
    """One component in one strip: boxes, a dot where nobody is, blank where only others are."""
    bands = {band.start: band for band in strip.panel.bands.get(component, ())}
    open_until = {index: band for band in bands.values() for index in range(band.start, band.end + 1)}
    index = strip.columns.start
    while index < strip.columns.stop:
        if index > strip.columns.start:
            yield Span(text=" ")
        band = open_until.get(index)
        if band is None:
            yield Span(text=("·" if index in strip.panel.free else "").center(strip.widths[index]), tone=Tone.DIM)
            index += 1
            continue
        end = min(band.end, strip.columns.stop - 1)
        space = sum(strip.widths[i] for i in range(index, end + 1)) + end - index
        text = clip(band.label, space).center(space) if strip.panel.columns[index].kind == CPU else _box(band, space, index, end)
        yield Span(text=text, tone=Tone.COMPONENT, component=component)
        index = end + 1


def _box(band: Band, space: int, first: int, last: int) -> str:
    """The columns ``first`` to ``last`` of a band; a side without a bracket goes on in another row."""
    inside = space - 2
    text = clip(band.label, inside)
    filled = text.center(inside) if band.start == band.end else text.center(inside, "─")
    return ("[" if first == band.start else "─") + filled + ("]" if last == band.end else "─")


def _components(grid: Grid, width: int) -> Iterator[Line]:
    name_width = min(max((len(component.name) for component in grid.components), default=0), max(10, width // 3))
    role_width = max((len(component.role.value) for component in grid.components), default=0)
    yield _heading("Components", grid.mode, width)
    for position, component in enumerate(grid.components):
        name = clip(component.name, name_width).ljust(name_width)
        head = f"  {component.role.value.ljust(role_width)}  "
        left = len(_INDENT) + name_width + len(head)
        own_lines = width - left < _MIN_FACTS
        if own_lines:
            left = 2 * len(_INDENT)
        facts = textwrap.wrap(component_facts(component), width - left, break_on_hyphens=False)
        yield (
            Span(text=_INDENT),
            Span(text=name, tone=Tone.COMPONENT, component=position),
            Span(text=head if own_lines else head + facts[0]),
        )
        for fact in facts[0 if own_lines else 1 :]:
            yield (Span(text=" " * left + fact),)
