"""Rows of kept trajectories as what a reader looks at: turns, whatever the job; a single response is one turn. Pure.

::

    trajectories/step-*.jsonl ── rows ──> Trajectory shown ──> rljob show (report.transcript), report.html (report.episodes)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rljob_runtime.report.jsonl import Row, number_of

ERROR = "error"
"""Why an episode ended that its environment failed."""


class Order(StrEnum):
    """Which trajectories come first."""

    NEWEST = "newest"
    """Those of the last step, within a step as they were kept: best to worst, then failed ones."""
    BEST = "best"
    WORST = "worst"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTurn:
    """What the policy was shown, what it did, and what that brought; NaN where it is not known."""

    observation: str
    action: str
    reward: float
    is_valid: bool
    """Whether the environment understood the action."""
    tokens: float
    """Sampled."""
    versions: tuple[int, ...]
    """Of the weights that sampled them, ascending."""
    generation_s: float
    environment_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrajectory:
    """A response, or an episode."""

    step: int
    group_id: int
    sample_index: int
    source: str
    """Its environment, or its data source."""
    score: float
    """NaN: it has none."""
    passed: bool
    error: str | None
    stop: str
    """Why it ended."""
    turns: tuple[ShownTurn, ...]
    last_observation: str
    answer: str
    """The reference answer; empty where there is none."""
    facts: tuple[tuple[str, float], ...]
    """Scores by reward, or the environment's numbers."""
    judgements: tuple[tuple[str, str], ...]
    """What judges said, by reward."""
    prompt_tokens: int
    tokens: int
    """After the prompt, observations included."""
    generation_s: float
    environment_s: float
    is_episode: bool

    @property
    def failed(self) -> bool:
        """Whether its environment or a reward failed, rather than the policy."""
        return math.isnan(self.score) or self.error is not None or self.stop == ERROR

    @property
    def versions(self) -> tuple[int, ...]:
        """Of all turns, ascending."""
        return tuple(sorted({version for turn in self.turns for version in turn.versions}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which trajectories are asked for; None: all."""

    group: int | None = None
    source: str | None = None
    failed: bool = False
    """Only those that failed."""
    order: Order = Order.NEWEST
    limit: int = 0
    """At most so many; 0: all."""


def shown(row: Row) -> ShownTrajectory:
    """One kept trajectory."""
    raw_turns = row.get("turns")
    is_episode = isinstance(raw_turns, list)
    turns = tuple(_turn(turn) for turn in raw_turns if isinstance(turn, dict)) if isinstance(raw_turns, list) else (_only_turn(row),)
    facts = row.get("summary") if is_episode else row.get("parts")
    error, judgements = row.get("error"), row.get("judgements")
    return ShownTrajectory(
        step=_integer(row, "step"),
        group_id=_integer(row, "group_id"),
        sample_index=_integer(row, "sample_index"),
        source=_text(row, "source"),
        score=number_of(row, "reward"),
        passed=row.get("passed") is True,
        error=None if error is None else str(error),
        stop=_text(row, "stop") or _text(row, "finish_reason"),
        turns=turns,
        last_observation=_text(row, "last_observation"),
        answer=_text(row, "answer"),
        facts=tuple((name, number_of(facts, name)) for name in facts) if isinstance(facts, dict) else (),
        judgements=tuple((name, str(text)) for name, text in judgements.items()) if isinstance(judgements, dict) else (),
        prompt_tokens=_integer(row, "prompt_tokens"),
        tokens=_integer(row, "response_tokens"),
        generation_s=number_of(row, "generation_s"),
        environment_s=number_of(row, "environment_s"),
        is_episode=is_episode,
    )


def select(rows: Iterable[Row], wanted: Selection) -> list[ShownTrajectory]:
    """The trajectories that are asked for, of rows in the order of their steps, in the order that is asked for."""
    found = [
        trajectory
        for trajectory in map(shown, rows)
        if wanted.group in (None, trajectory.group_id)
        and wanted.source in (None, trajectory.source)
        and (trajectory.failed or not wanted.failed)
    ]
    if wanted.order is Order.NEWEST:
        found.sort(key=lambda t: -t.step)
    else:
        sign = -1 if wanted.order is Order.BEST else 1
        found = [t for t in found if not math.isnan(t.score)] if not wanted.failed else found
        found.sort(key=lambda t: (sign * t.score if not math.isnan(t.score) else math.inf, -t.step))
    return found[: wanted.limit] if wanted.limit else found


def versions_text(versions: Sequence[int]) -> str:
    """``v3``, ``v3 to v5``, ``-`` where nothing was sampled."""
    if not versions:
        return "-"
    first, last = versions[0], versions[-1]
    return f"v{first}" if first == last else f"v{first} to v{last}"


def _turn(row: Row) -> ShownTurn:
    versions = row.get("versions")
    return ShownTurn(
        observation=_text(row, "observation"),
        action=_text(row, "action"),
        reward=number_of(row, "reward"),
        is_valid=row.get("action_valid") is not False,
        tokens=number_of(row, "tokens"),
        versions=tuple(int(v) for v in versions) if isinstance(versions, list) else (),
        generation_s=number_of(row, "generation_s"),
        environment_s=number_of(row, "environment_s"),
    )


def _only_turn(row: Row) -> ShownTurn:
    """A single response: the prompt is what it was shown."""
    ends = [number_of(row, key) for key in ("version_first", "version_last")]
    return ShownTurn(
        observation=_text(row, "prompt"),
        action=_text(row, "response"),
        reward=number_of(row, "reward"),
        is_valid=True,
        tokens=number_of(row, "response_tokens"),
        versions=tuple(sorted({int(version) for version in ends if math.isfinite(version)})),
        generation_s=number_of(row, "generation_s"),
        environment_s=math.nan,
    )


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value)


def _integer(row: Row, key: str) -> int:
    value = number_of(row, key)
    return int(value) if math.isfinite(value) else 0
