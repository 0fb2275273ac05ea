"""What the driver and an Environment worker send each other, in both directions, no behavior.

::

    driver ── EpisodeStart ──> worker ── EpisodeReply (the whole first prompt) ──> driver ─┐
      ^                                                                                    │ engine samples
      └── EpisodeReply (token ids to append) <── worker <── EpisodeAction <── driver <─────┘
                                                        ... until ``done``

A start and every action get exactly one reply; an end gets none. The prompt of the next action is all token ids of the episode so far
with those of the reply behind them: nothing is ever encoded again. Where turns have prompts of their own, the reply has the whole one.

Shape legend: ``n`` tokens of one message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_runtime.records import FloatArray, IntArray


class StopReason(StrEnum):
    """Why an episode is over."""

    NOT_YET = ""
    """It goes on: sample an action."""
    DONE = "done"
    """The environment ended it: solved, failed, or at a limit of its own."""
    MAX_TURNS = "maxTurns"
    """The entry's ``maxTurns`` actions were taken."""
    MAX_TOKENS = "maxTokens"
    """No room for another action behind what there is."""
    TIMEOUT = "timeout"
    """The episode took longer than the entry's ``episodeTimeoutSeconds``; its rewards so far count."""
    ERROR = "error"
    """The environment raised, hung, or its process died; ``error`` says which. Its rewards are no measure of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """Begin an episode."""

    episode_id: str
    """Unique among the episodes that this worker has not finished."""
    environment: str
    """Name of the entry of the spec (``spec.environments[].name``)."""
    seed: int
    """0 or above; the same seed is the same task. All members of a group have the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeAction:
    """What the policy sampled since the last observation."""

    episode_id: str
    token_ids: IntArray
    """Shape (n,), the stop token included where one was sampled."""
    finish_reason: str
    """The engine's: ``stop`` or ``length``."""
    logprobs: FloatArray | None = None
    """Shape (n,), where the reply before asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """The driver gives an episode up (cancelled, too stale); unknown and finished ones are passed over."""

    episode_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReply:
    """What a start or an action led to."""

    episode_id: str
    token_ids: IntArray
    """Shape (n,): to append behind all token ids so far; at the start the whole first prompt, and later ones where turns have prompts of
    their own; empty once the episode is over."""
    reward: float = 0.0
    """Of this action, penalties included."""
    done: bool = False
    """Whether the episode is over; the worker has forgotten it then."""
    stop: StopReason = StopReason.NOT_YET
    error: str | None = None
    """One line, with ``stop`` error: what the environment raised, or that it hung or died."""
    turn: int = 0
    """Number of actions taken."""
    observation: str = ""
    """For people: the environment's text; of the last action too, although no token of it is appended."""
    action: str = ""
    """For people: what was sampled, decoded; empty at the start."""
    info: Mapping[str, float] = field(default_factory=dict)
    """The environment's numbers for the metrics, such as ``success``."""
    summary: Mapping[str, float] = field(default_factory=dict)
    """With ``done``: the environment's numbers over the whole episode: the mean, the last of ``success``, or as the environment asks."""
    state_key: str | None = None
    """Equal for equal states of the task in which the next action is taken: what GiGPO compares, within a group; None with an error."""
    action_valid: bool = True
    """Whether the environment understood the action."""
    max_tokens: int = 0
    """Most tokens that the next action may have; 0 once the episode is over."""
    branch: int = 0
    """The sample of the episode that the next action belongs to; one more than there are so far begins another, whose whole prompt
    ``token_ids`` are. Only programs have more than one: where what they send does not continue what was said before."""
    kept_tokens: int | None = None
    """So many tokens of the action just taken count: nobody read what is behind a stop string. None: all."""
    wants_logprobs: bool = False
    """Whether the next action is to bring its log-probs."""
