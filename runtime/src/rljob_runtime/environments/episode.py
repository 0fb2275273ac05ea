"""One episode in an Environment worker: from what the environment did to what the driver receives. No clock, no I/O.

::

    Turn ──> limits ──> token ids to append (codec) ──> EpisodeReply
"""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rljob_runtime.environments.codec import Codec, Place
from rljob_runtime.environments.config import EnvironmentConfig
from rljob_runtime.environments.messages import EpisodeAction, EpisodeReply, StopReason
from rljob_runtime.environments.outcome import Outcome
from rljob_runtime.environments.protocol import Aggregation, Turn
from rljob_runtime.environments.turn_prompts import PastTurn
from rljob_runtime.records import IntArray

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int32)
_LAST_COUNTS = ("success", "solved")
"""Numbers whose last value is the episode's, without being named in a turn's aggregation."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """What is known of it."""

    key: str
    config: EnvironmentConfig
    codec: Codec
    deadline: float
    """On the monotonic clock."""
    num_tokens: int = 0
    """Of all that the next action is sampled behind."""
    turn: int = 0
    begun: bool = False
    """Whether the first prompt was made."""
    acting: bool = True
    """Whether the environment is at work; else the driver is."""
    expired: bool = False
    _first: Turn | None = None
    """What the reset led to, where turns have prompts of their own."""
    _past: deque[PastTurn] = field(default_factory=deque)
    """The turns that the next prompt may show."""
    _observation: str = ""
    _action: str = ""
    _last_token_id: int | None = None
    _values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _aggregation: dict[str, Aggregation] = field(default_factory=dict)

    def take(self, action: EpisodeAction) -> str:
        """Count what was sampled; returns its text."""
        self.num_tokens += len(action.token_ids)
        self._last_token_id = int(action.token_ids[-1]) if len(action.token_ids) else None
        self._action = self.codec.text(action.token_ids)
        self.acting = True
        return self._action

    def answered(self, outcome: Outcome) -> EpisodeReply:
        """The reply to what the driver sent last."""
        if outcome.turn is None:
            return self.failed(outcome.error)
        return self.acted(outcome.turn) if self.begun else self.began(outcome.turn)

    def began(self, turn: Turn) -> EpisodeReply:
        """The reply with the first prompt."""
        self.acting, self.begun = False, True
        if turn.done:
            return self.failed(f"environment {self.config.name!r}: the episode was over before its first action")
        if self.config.prompt.memory is None:
            ids = self.codec.first_prompt(turn, self._place())
        else:
            self._first, self._past = turn, deque(maxlen=self.config.prompt.memory.turns)
            ids = self.codec.own_prompt(turn, turn, self._place(), ())
        self._observation = turn.observation
        self.num_tokens = len(ids)
        if self._room() < 1:
            return self.failed(
                f"environment {self.config.name!r}: the first prompt has {len(ids)} tokens, and an episode at most "
                f"{self.config.max_episode_tokens}; raise the limit or shorten the prompt"
            )
        return self._reply(turn, StopReason.NOT_YET, ids, 0.0)

    def acted(self, turn: Turn) -> EpisodeReply:
        """The reply to an action."""
        self.acting = False
        self.turn += 1
        for name, value in turn.info.items():
            self._values[name].append(value)
        self._aggregation.update(turn.aggregation)
        reward = turn.reward + (0.0 if turn.action_valid else self.config.format_penalty)
        if turn.done:
            return self._reply(turn, StopReason.DONE, NO_TOKENS, reward)
        if self.turn >= self.config.max_turns:
            return self._reply(turn, StopReason.MAX_TURNS, NO_TOKENS, reward)
        if self.expired:
            return self._reply(turn, StopReason.TIMEOUT, NO_TOKENS, reward)
        ids = self._next_prompt(turn, reward)
        if self._room() < 1:
            return self._reply(turn, StopReason.MAX_TOKENS, NO_TOKENS, reward)
        return self._reply(turn, StopReason.NOT_YET, ids, reward)

    def _next_prompt(self, turn: Turn, reward: float) -> IntArray:
        """What comes before the next action: behind all so far, or a prompt of its own."""
        if self._first is None:
            ids = self.codec.continuation(self._last_token_id, turn, self._place())
            self.num_tokens += len(ids)
            return ids
        past = PastTurn(
            number=self.turn,
            observation=self._observation,
            action=self._action,
            reward=reward,
            action_valid=turn.action_valid,
        )
        self._past.append(past)
        self._observation = turn.observation
        ids = self.codec.own_prompt(self._first, turn, self._place(), tuple(self._past))
        self.num_tokens = len(ids)
        return ids

    def failed(self, error: str) -> EpisodeReply:
        """The reply when the environment cannot go on."""
        return self._ended(StopReason.ERROR, error)

    def timed_out(self) -> EpisodeReply:
        """The reply to an action for which there is no time left; the environment has not seen it."""
        return self._ended(StopReason.TIMEOUT, None)

    def _ended(self, stop: StopReason, error: str | None) -> EpisodeReply:
        return EpisodeReply(
            episode_id=self.key,
            token_ids=NO_TOKENS,
            done=True,
            stop=stop,
            error=error,
            turn=self.turn,
            action=self._action,
            summary=self._summary(),
        )

    def _reply(self, turn: Turn, stop: StopReason, ids: IntArray, reward: float) -> EpisodeReply:
        done = stop is not StopReason.NOT_YET
        return EpisodeReply(
            episode_id=self.key,
            token_ids=ids,
            reward=reward,
            done=done,
            stop=stop,
            turn=self.turn,
            observation=turn.observation,
            action=self._action,
            info=turn.info,
            summary=self._summary() if done else {},
            state_key=_digest(turn.observation if turn.state_key is None else turn.state_key),
            action_valid=turn.action_valid,
            max_tokens=0 if done else min(self.config.max_tokens_per_turn, self._room()),
        )

    def _room(self) -> int:
        return self.config.max_episode_tokens - self.num_tokens

    def _place(self) -> Place:
        return Place(turn=self.turn, actions_left=self.config.max_turns - self.turn, max_tokens=self.config.max_tokens_per_turn)

    def _summary(self) -> Mapping[str, float]:
        return {
            name: _aggregate(values, self._aggregation.get(name, "last" if name in _LAST_COUNTS else "mean"))
            for name, values in self._values.items()
        }


def _aggregate(values: Sequence[float], mode: Aggregation) -> float:
    match mode:
        case "mean":
            return sum(values) / len(values)
        case "sum":
            return sum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "first":
            return values[0]
        case "last":
            return values[-1]


def _digest(state: str) -> str:
    """32 hexadecimal digits: states are long, and compared only."""
    return hashlib.blake2b(state.encode(errors="surrogatepass"), digest_size=16).hexdigest()
