"""Kept trajectories as text on a terminal or in a pipe: per turn what the policy saw and did, and what it brought."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rljob_runtime.report.reading import ShownTrajectory, ShownTurn, versions_text
from rljob_runtime.report.text import format_seconds, format_value

MAX_CHARS, MAX_LINES = 1_200, 24
"""A longer text is cut in its middle, if not all of it is asked for: the task is at its beginning, the answer at its end."""
_LABEL_WIDTH = 11
_SOFT, _GOOD, _BAD = "grey62", "green3", "red3"


def print_trajectories(trajectories: Iterable[ShownTrajectory], console: Console, *, full: bool = False) -> None:
    """Print each with all its turns.

    Args:
        trajectories: in the order of printing.
        console: takes colors off where there is no terminal.
        full: whether long texts are printed whole.
    """
    for trajectory in trajectories:
        console.print(Rule(characters="─", style="grey39"))
        console.print(_head(trajectory))
        console.print(Text(facts_of(trajectory), style=_SOFT))
        if trajectory.error is not None:
            console.print(Text(printable(trajectory.error), style=_BAD))
        for number, turn in enumerate(trajectory.turns, start=1):
            if trajectory.is_episode:
                console.print(_turn_head(number, turn))
            console.print(_texts(_turn_rows(trajectory, turn), full=full))
        if trajectory.last_observation:
            console.print(Text(" at the end", style="bold"))
            console.print(_texts([("observation", trajectory.last_observation, "")], full=full))


def facts_of(trajectory: ShownTrajectory) -> str:
    """Turns, tokens, versions and seconds in one line."""
    count = len(trajectory.turns)
    parts = [f"{count} turn{'' if count == 1 else 's'}"] if trajectory.is_episode else []
    parts.append(f"stopped: {trajectory.stop or '-'}")
    parts.append(f"{trajectory.prompt_tokens:,} + {trajectory.tokens:,} tokens")
    parts.append(f"sampled by {versions_text(trajectory.versions)}")
    parts.append(f"generation {format_seconds(trajectory.generation_s)}")
    if math.isfinite(trajectory.environment_s):
        parts.append(f"environment {_short_s(trajectory.environment_s)}")
    parts += [f"{name} {format_value(value)}" for name, value in trajectory.facts]
    return printable(", ".join(parts))


def turn_facts(turn: ShownTurn) -> list[str]:
    """Reward, versions, tokens and seconds of a turn; what is not known is left out."""
    known = [
        (turn.reward, f"reward {format_value(turn.reward)}"),
        (len(turn.versions), versions_text(turn.versions)),
        (turn.tokens, f"{turn.tokens:,.0f} tokens"),
        (turn.generation_s, f"generation {format_seconds(turn.generation_s)}"),
        (turn.environment_s, f"environment {_short_s(turn.environment_s)}"),
    ]
    return [text for value, text in known if math.isfinite(value)]


def printable(text: str) -> str:
    """A text that cannot steer a terminal: what a model or an environment wrote may hold any character."""
    return "".join(c if c.isprintable() or c == "\n" else "    " if c == "\t" else repr(c)[1:-1] for c in text)


def cut(text: str, *, full: bool) -> str:
    """A long text without its middle."""
    if full:
        return text
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        head = MAX_LINES * 2 // 3
        tail = MAX_LINES - head
        text = "\n".join([*lines[:head], f"[... {len(lines) - MAX_LINES:,} more lines, see --full ...]", *lines[-tail:]])
    if len(text) > MAX_CHARS:
        head = MAX_CHARS * 2 // 3
        tail = MAX_CHARS - head
        text = f"{text[:head]}[... {len(text) - MAX_CHARS:,} more characters, see --full ...]{text[-tail:]}"
    return text


def _short_s(value_s: float) -> str:
    """A time that is often below a millisecond."""
    return f"{value_s * 1000:.2g} ms" if value_s < 0.1 else format_seconds(value_s)


def _head(trajectory: ShownTrajectory) -> Table:
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(justify="right", no_wrap=True)
    where = f"step {trajectory.step}  group {trajectory.group_id}  sample {trajectory.sample_index}"
    grid.add_row(Text.assemble((where, "bold"), "  ", printable(trajectory.source)), _verdict(trajectory))
    return grid


def _verdict(trajectory: ShownTrajectory) -> Text:
    if math.isnan(trajectory.score):
        return Text("no reward", style=_BAD)
    word = "failed" if trajectory.failed else "passed" if trajectory.passed else "not passed"
    return Text.assemble((f"reward {format_value(trajectory.score)}", "bold"), "  ", (word, _GOOD if word == "passed" else _BAD))


def _turn_head(number: int, turn: ShownTurn) -> Text:
    line = Text.assemble((f" turn {number}", "bold"), "  ", (", ".join(turn_facts(turn)), _SOFT))
    if not turn.is_valid:
        line.append("  action not understood", style=_BAD)
    return line


def _turn_rows(trajectory: ShownTrajectory, turn: ShownTurn) -> list[tuple[str, str, str]]:
    if trajectory.is_episode:
        return [("observation", turn.observation, ""), ("action", turn.action, "bold")]
    reference = [("reference", trajectory.answer, "")] if trajectory.answer else []
    judged = [("judge", text if len(trajectory.judgements) == 1 else f"{name}: {text}", "") for name, text in trajectory.judgements]
    return [("prompt", turn.observation, ""), ("response", turn.action, "bold"), *reference, *judged]


def _texts(rows: Iterable[tuple[str, str, str]], *, full: bool) -> Padding:
    """Label, text and style of each, side by side."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL_WIDTH, no_wrap=True, style=_SOFT)
    grid.add_column(overflow="fold")
    for label, text, style in rows:
        grid.add_row(label, Text(cut(printable(text), full=full), style=style))
    return Padding(grid, (0, 0, 0, 3), expand=False)
