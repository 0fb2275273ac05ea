"""What a call of an environment led to, wherever it runs, and what is counted of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, cast, get_args

from rljob_runtime.environments.protocol import Aggregation, Turn
from rljob_runtime.records import IntArray
from rljob_runtime.sandbox.process import BrokenProtocolError


class Failure(StrEnum):
    """Why a call came to nothing."""

    RAISED = "raised"
    TIMEOUT = "timeout"
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a program asks the policy for."""

    key: str
    """The episode."""
    token_ids: IntArray
    """Shape (n,), ``branch``, ``max_tokens`` and ``wants_logprobs``: as in :class:`.messages.EpisodeReply`."""
    branch: int
    max_tokens: int
    wants_logprobs: bool
    text: str
    """For people: what the token ids are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a program was given of the last action."""

    key: str
    """The episode."""
    text: str
    kept_tokens: int
    """Tokens up to the end of a stop string, or all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of one call: a turn, or an error that ends the episode; of a program a call of its own, or its end as a turn."""

    key: str
    """The episode."""
    turn: Turn | None = None
    call: Call | None = None
    read: Read | None = None
    """Of the action before it; None where a program read nothing of it."""
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Counters:
    """Since the start."""

    resets: int = 0
    steps: int = 0
    reset_s: float = 0.0
    """Inside the environments, those that were played again included."""
    step_s: float = 0.0
    failures: Counter[Failure] = field(default_factory=Counter)
    """Calls, those that were tried again included."""
    retries: int = 0
    restarts: int = 0
    """Processes that ended, by themselves or by being killed."""

    def took(self, elapsed_s: float, *, is_reset: bool) -> None:
        """Count a call."""
        if is_reset:
            self.resets += 1
            self.reset_s += elapsed_s
        else:
            self.steps += 1
            self.step_s += elapsed_s


def parse_answer(body: bytes) -> tuple[Turn | None, str, float]:
    """Turn or None, error, and seconds, of what a process answered.

    Raises:
        BrokenProtocolError: it is no answer.
    """
    try:
        answer = json.loads(body)
        elapsed_s = float(answer["elapsed_s"])
        if "error" in answer:
            return None, str(answer["error"]), elapsed_s
        return _turn(answer["turn"]), "", elapsed_s
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BrokenProtocolError("it wrote something that is not an answer") from error


def _turn(fields: dict[str, Any]) -> Turn:
    reward = float(fields["reward"])
    if not math.isfinite(reward):
        raise ValueError(f"reward is {reward}")
    return Turn(
        observation=str(fields["observation"]),
        reward=reward,
        done=bool(fields["done"]),
        info={str(name): float(value) for name, value in fields["info"].items()},
        aggregation={str(name): cast(Aggregation, mode) for name, mode in fields["aggregation"].items() if mode in get_args(Aggregation)},
        instruction=str(fields["instruction"]),
        suffix=str(fields["suffix"]),
        role="tool" if fields["role"] == "tool" else "user",
        action_valid=bool(fields["action_valid"]),
        state_key=None if fields["state_key"] is None else str(fields["state_key"]),
    )
