"""Pictures of a plan: devices x components, who shares, sync routes. Pure: plan in, text out.

::

    Plan -> grid_of -> Grid (exact, identical nodes folded) -> layout (columns, bands, what is left out) -> terminal | svg | html

Nothing here imports rich; the terminal renderer returns spans with a tone that the caller colors.
"""

from rljob_runtime.plan_view.grid import Fold, Grid, Seat, Seated, grid_of, place
from rljob_runtime.plan_view.html import Section, page
from rljob_runtime.plan_view.palette import Color, color
from rljob_runtime.plan_view.routes import Route, routes_of
from rljob_runtime.plan_view.svg import svg
from rljob_runtime.plan_view.terminal import Line, Span, Tone, picture, plain
from rljob_runtime.plan_view.words import ranges, units

__all__ = [
    "Color",
    "Fold",
    "Grid",
    "Line",
    "Route",
    "Seat",
    "Seated",
    "Section",
    "Span",
    "Tone",
    "color",
    "grid_of",
    "page",
    "picture",
    "place",
    "plain",
    "ranges",
    "routes_of",
    "svg",
    "units",
]
