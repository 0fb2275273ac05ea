"""Episodes on the page of a run: one line each, which opens to a table of its turns. Everything that others wrote is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from rljob_runtime.report.reading import ShownTrajectory, ShownTurn, versions_text
from rljob_runtime.report.text import format_value
from rljob_runtime.report.transcript import facts_of, turn_facts

MAX_TEXT_CHARS = 4_000
"""Longer texts are cut on the page; their file has all of them."""
STYLE = """
.episode { padding: 8px 16px; margin-top: 8px; } .episode summary { font-weight: 400; }
.episode summary b { display: inline-block; min-width: 92px; } .episode table { margin: 4px 0 8px; }
.strip { display: inline-flex; gap: 3px; vertical-align: -1px; margin: 0 10px; }
.strip i { width: 9px; height: 13px; border-radius: 2px; background: #b9c4cf; }
.strip i.up { background: #5aa874; } .strip i.down { background: #d27474; } .strip i.invalid { background: #e0b064; }
.key .strip { margin: 0 4px 0 12px; }
"""
KEY = (
    '<p class="small key">One box a turn:'
    '<span class="strip"><i class="up"></i></span>reward above 0<span class="strip"><i class="down"></i></span>below 0'
    '<span class="strip"><i></i></span>0<span class="strip"><i class="invalid"></i></span>action not understood</p>'
)


def cut_text(text: str, file_name: str) -> str:
    """A text as HTML, of at most ``MAX_TEXT_CHARS`` characters."""
    more = len(text) - MAX_TEXT_CHARS
    cut = f'\n<span class="small">({more:,} more characters in {escape(file_name)})</span>' if more > 0 else ""
    return f"<pre>{escape(text[:MAX_TEXT_CHARS])}{cut}</pre>"


def episodes_html(trajectories: Sequence[ShownTrajectory], file_name: str) -> str:
    """All of one step; ``file_name`` has their whole texts."""
    return KEY + "".join(_episode(trajectory, file_name) for trajectory in trajectories)


def _episode(trajectory: ShownTrajectory, file_name: str) -> str:
    count = len(trajectory.turns)
    facts = f"{count} turn{'' if count == 1 else 's'}, {trajectory.stop}, {versions_text(trajectory.versions)}"
    place = f"group {trajectory.group_id}, sample {trajectory.sample_index}: {escape(facts)}"
    head = f'{_score(trajectory)}{escape(trajectory.source)} <span class="small">{place}</span>{_strip(trajectory.turns)}'
    error = f'<p class="bad">{escape(trajectory.error)}</p>' if trajectory.error is not None else ""
    columns = '<th style="width:56px">Turn</th><th>Observation</th><th style="width:33%">Action</th><th style="width:22%">Reward</th>'
    rows = "".join(_turn(number, turn, file_name) for number, turn in enumerate(trajectory.turns, start=1))
    if trajectory.last_observation:
        rows += f"<tr><td>end</td><td>{cut_text(trajectory.last_observation, file_name)}</td><td></td><td></td></tr>"
    table = f"<table><tr>{columns}</tr>{rows}</table>" if rows else ""
    all_facts = f'<p class="small">{escape(facts_of(trajectory))}</p>'
    return f'<details class="episode"><summary>{head}</summary>{all_facts}{error}{table}</details>'


def _score(trajectory: ShownTrajectory) -> str:
    if math.isnan(trajectory.score):
        return '<b class="bad">no reward</b>'
    return f'<b class="{"ok" if trajectory.passed else "bad"}">{format_value(trajectory.score)}</b>'


def _strip(turns: Sequence[ShownTurn]) -> str:
    boxes = "".join(f'<i class="{_kind(turn)}" title="turn {number}"></i>' for number, turn in enumerate(turns, start=1))
    return f'<span class="strip">{boxes}</span>'


def _kind(turn: ShownTurn) -> str:
    if not turn.is_valid:
        return "invalid"
    return "up" if turn.reward > 0 else "down" if turn.reward < 0 else ""


def _turn(number: int, turn: ShownTurn, file_name: str) -> str:
    invalid = '<br><span class="warning">not understood</span>' if not turn.is_valid else ""
    reward = f"<b>{format_value(turn.reward)}</b>" if math.isfinite(turn.reward) else ""
    facts = escape(", ".join(turn_facts(turn)[1 if reward else 0 :]))
    cells = f"<td>{number}</td><td>{cut_text(turn.observation, file_name)}</td>"
    return f'<tr>{cells}<td>{cut_text(turn.action, file_name)}{invalid}</td><td>{reward}<br><span class="small">{facts}</span></td></tr>'
