"""An episode that a program plays: from what it asks for to what the driver receives. No clock, no I/O.

The program's messages are in tokens already (:mod:`.endpoint`), and its limits are kept there; only its end is known here.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_runtime.environments.config import EnvironmentConfig
from rljob_runtime.environments.episode import NO_TOKENS
from rljob_runtime.environments.messages import EpisodeAction, EpisodeReply, StopReason
from rljob_runtime.environments.outcome import Outcome


@dataclass(slots=True, kw_only=True)
class HarnessEpisode:
    """What is known of it."""

    key: str
    config: EnvironmentConfig
    deadline: float
    """On the monotonic clock."""
    turn: int = 0
    acting: bool = True
    """Whether the program is at work; else the driver is."""
    expired: bool = False

    def take(self, action: EpisodeAction) -> None:
        """Count an action."""
        self.turn += 1
        self.acting = True

    def answered(self, outcome: Outcome) -> EpisodeReply:
        """The reply to what the driver sent last."""
        self.acting = False
        call, turn = outcome.call, outcome.turn
        if call is not None:
            return EpisodeReply(
                episode_id=self.key,
                token_ids=call.token_ids,
                turn=self.turn,
                observation=call.text,
                action="" if outcome.read is None else outcome.read.text,
                max_tokens=call.max_tokens,
                branch=call.branch,
                kept_tokens=self._kept(outcome),
                wants_logprobs=call.wants_logprobs,
            )
        if turn is None:
            return self._ended(StopReason.ERROR, outcome.error)
        return EpisodeReply(
            episode_id=self.key,
            token_ids=NO_TOKENS,
            reward=turn.reward,
            done=True,
            stop=StopReason.DONE,
            turn=self.turn,
            action="" if outcome.read is None else outcome.read.text,
            info=turn.info,
            summary=dict(turn.info),
            kept_tokens=self._kept(outcome),
        )

    def timed_out(self) -> EpisodeReply:
        """The reply when its time is over: without a reward there is nothing to learn from it."""
        limit = self.config.episode_timeout_s
        return self._ended(StopReason.TIMEOUT, f"environment {self.config.name!r}: its program took longer than {limit:g} s")

    def _kept(self, outcome: Outcome) -> int | None:
        if outcome.read is not None:
            return outcome.read.kept_tokens
        return 0 if self.turn else None  # nobody read the last action

    def _ended(self, stop: StopReason, error: str) -> EpisodeReply:
        return EpisodeReply(episode_id=self.key, token_ids=NO_TOKENS, done=True, stop=stop, error=error, turn=self.turn)
