"""Colors of components: the palette of Okabe and Ito (2008), which stays apart for color-blind readers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Color:
    """A fill and the text on it; their contrast is at least 4.5."""

    fill: str
    ink: str


PALETTE = (
    Color(fill="#0072b2", ink="#ffffff"),
    Color(fill="#e69f00", ink="#000000"),
    Color(fill="#009e73", ink="#000000"),
    Color(fill="#cc79a7", ink="#000000"),
    Color(fill="#56b4e9", ink="#000000"),
    Color(fill="#d55e00", ink="#000000"),
    Color(fill="#f0e442", ink="#000000"),
    Color(fill="#999999", ink="#000000"),
)
"""By position of the component; it starts again after the last, so names stay beside the colors."""


def color(component: int) -> Color:
    """Color of the component at that position."""
    return PALETTE[component % len(PALETTE)]
