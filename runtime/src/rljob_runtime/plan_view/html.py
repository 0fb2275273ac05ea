"""The picture as one self-contained HTML page: the SVG, the components, the processes, and whatever rows the caller adds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from rljob_runtime.plan_view.grid import Fold, Grid, Seat
from rljob_runtime.plan_view.layout import component_facts
from rljob_runtime.plan_view.palette import color
from rljob_runtime.plan_view.routes import Route
from rljob_runtime.plan_view.svg import svg
from rljob_runtime.plan_view.words import clip, count, short_ranges, units

MAX_ROWS = 400
"""Rows of the table of processes."""
MAX_SINGLE = 256
"""Processes that are listed one by one; of more, those of a node and a component share a row, and folded nodes too."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1f2933;--dim:#5f6b7a;--line:#d0d7de;--page:#f3f5f7;--card:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e3e8ee;--dim:#98a5b3;--line:#36414d;--page:#0c1014;--card:#12171d}}
body{margin:0;background:var(--page);color:var(--ink);font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1050px;margin:0 auto;padding:28px 20px 48px}h1{font-size:22px;margin:0}h2{font-size:16px;margin:0 0 10px}
.lead{color:var(--dim);margin:4px 0 20px}section{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:0 0 18px;
padding:18px 20px;overflow-x:auto}section.picture{padding:4px}svg.pv{display:block;width:100%;min-width:720px;height:auto}
table{border-collapse:collapse;width:100%}th{color:var(--dim);font-weight:600;text-align:left}
th,td{padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}tr:last-child td{border-bottom:0}
.name{white-space:nowrap}.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:8px}
.more{color:var(--dim);margin:10px 0 0}summary{cursor:pointer;font-size:16px;font-weight:600}details table{margin-top:10px}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """More to show below the picture, for example memory per device or why Auto chose this placement."""

    title: str
    columns: tuple[str, ...]
    """Heads; may be empty."""
    rows: tuple[tuple[str, ...], ...]


def page(grid: Grid, name: str, lead: str, routes: Sequence[Route] = (), sections: Sequence[Section] = ()) -> str:
    """The page. ``lead`` is one sentence under the job's name; nothing is loaded from elsewhere."""
    cards = [f'<section class="picture">{svg(grid, name, routes)}</section>', _components(grid)]
    cards += [_card(section) for section in sections]
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(name)}: placement</title>",
            f"<style>{_STYLE}</style></head>",
            f'<body><main><h1>{escape(name)}</h1><p class="lead">{escape(lead)}</p>',
            *cards,
            _processes(grid),
            "</main></body></html>\n",
        )
    )


def _card(section: Section) -> str:
    return f"<section><h2>{escape(section.title)}</h2>{_table(section.columns, (map(escape, row) for row in section.rows))}</section>"


def _table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """``rows`` hold HTML, ``columns`` plain text."""
    head = f"<thead><tr>{''.join(f'<th>{escape(column)}</th>' for column in columns)}</tr></thead>" if columns else ""
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>\n{body}\n</tbody></table>"


def _components(grid: Grid) -> str:
    rows = (
        (_named(grid, position), escape(component.role.value), escape(clip(component_facts(component), 400)))
        for position, component in enumerate(grid.components)
    )
    return f"<section><h2>Components</h2>{_table(('component', 'role', 'processes'), rows)}</section>"


def _named(grid: Grid, component: int) -> str:
    fill = color(component).fill
    return f'<span class="name"><span class="key" style="background:{fill}"></span>{escape(grid.components[component].name)}</span>'


def _processes(grid: Grid) -> str:
    total = sum(component.num_processes for component in grid.components)
    rows = sorted(_single_rows(grid) if total <= MAX_SINGLE else _folded_rows(grid), key=lambda row: row[:2])
    cells = ((_named(grid, component), *map(escape, texts)) for component, _, texts in rows[:MAX_ROWS])
    table = _table(("component", "process", "node", "runs on"), cells)
    more = len(rows) - MAX_ROWS
    left_out = f'<p class="more">{count(more, "more row")}; rljob plan --output json lists every process.</p>' if more > 0 else ""
    is_open = " open" if len(rows) <= 40 else ""
    return f"<section><details{is_open}><summary>{count(total, 'process')}</summary>{table}{left_out}</details></section>"


_Row = tuple[int, int, tuple[str, str, str]]
"""Component, first rank, cells."""


def _single_rows(grid: Grid) -> Iterator[_Row]:
    for group in grid.groups:
        for fold in group.folds:
            for position, node in enumerate(fold.nodes):
                for seat in fold.seats:
                    rank = fold.rank(seat, position)
                    yield seat.component, rank, (str(rank), f"{node} ({group.name})", _places((seat,)))


def _folded_rows(grid: Grid) -> Iterator[_Row]:
    """One row per component and fold."""
    for group in grid.groups:
        for fold in group.folds:
            by_component: dict[int, list[Seat]] = {}
            for seat in fold.seats:
                by_component.setdefault(seat.component, []).append(seat)
            for component, seats in by_component.items():
                first = fold.first_ranks[component]
                ranks = short_ranges((fold.rank(seat, 0) for seat in seats), 60)
                step = f", then {fold.rank_steps[component]:+d} per node" if len(fold.nodes) > 1 else ""
                yield component, first, (ranks + step, f"{_nodes(fold)} ({group.name})", _places(seats))


def _nodes(fold: Fold) -> str:
    nodes = fold.nodes
    if len(nodes) == 1:
        return str(nodes[0])
    return f"{nodes[0]}-{nodes[-1]}" if nodes.step == 1 else f"{nodes[0]}, {nodes[1]} .. {nodes[-1]}"


def _places(seats: Sequence[Seat]) -> str:
    """For example ``device 0``, ``devices 0-3``, ``Franka 1``, ``CPU``."""
    by_kind: dict[str | None, set[int]] = {}
    for seat in seats:
        by_kind.setdefault(seat.kind, set()).update(seat.places)
    return ", ".join(units(kind, tuple(sorted(places))) for kind, places in by_kind.items())
