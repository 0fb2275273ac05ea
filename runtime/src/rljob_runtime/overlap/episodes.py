"""Episodes of several turns: from the environment to the engines and back, until the environment says that it is over.

::

    add(member) ──> EnvironmentRouter: start ──> on_replies: the first prompt ─┐
                                                                               v
      on_played <── over ── on_replies <── act ── on_finished <── EngineFleet: the next action, a Sample of its own

The prompt of a turn is all token ids so far; nothing is ever encoded again (EXACT). Segments alternate: sampled by an engine, given by
the environment. What an environment shows last is never part of them, so that the last one is sampled. An episode is one branch, and more
where a prompt does not continue what was said: turns with prompts of their own (``prompt.history: Turn``), agent programs.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

import numpy as np

from rljob_runtime.environments.messages import EpisodeAction, EpisodeReply, EpisodeStart, StopReason
from rljob_runtime.errors import EpisodesFailedError, RuntimeFault
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.fleet import EngineFleet
from rljob_runtime.overlap.fleet_engine import now_s
from rljob_runtime.overlap.samples import Response, Sample, first_tokens
from rljob_runtime.records import (
    Completion,
    EpisodeRecord,
    GenerationRequest,
    IntArray,
    Prompt,
    RewardResult,
    Sampling,
    Segment,
    Turn,
)

SEED = "seed"
"""Of the metadata of a task: what its environment is reset with."""
MAX_RESTARTS = 1
"""Times that an episode begins again because its worker was lost."""
WATCHED_EPISODES = 100
"""The run fails when more than half of so many episodes in a row failed."""


class EpisodeOwner(Protocol):
    """Who has episodes played."""

    @property
    def priority(self) -> int:
        """Requests of a lower one are handed out first."""

    def on_started(self, sample: Sample) -> None:
        """A turn of this member is given to an engine."""

    def on_played(self, played: list[tuple[Sample, Response]]) -> None:
        """Take episodes that are over, failed ones among them (no score); must not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRules:
    """What the driver needs to know of an environment."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end an action besides the model's own."""
    on_error: float | None = None
    """Score of an episode that its environment failed; None: it is left out."""
    own_prompts: bool = False
    """Whether what it gives is the whole prompt of the next action."""


@dataclass(slots=True)
class EpisodeCounters:
    """What happened since the last :meth:`EpisodePlayer.take_counters`."""

    errors: Counter[str] = field(default_factory=Counter)
    """By environment: episodes that ended with an error of it."""
    timeouts: Counter[str] = field(default_factory=Counter)
    """By environment: episodes that ran past their limit of time."""
    restarts: int = 0
    """Episodes begun again because their worker was lost."""
    cancelled: int = 0
    tokens_cancelled: int = 0
    """Sampled in finished turns of episodes that were given up."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Branch:
    """A prompt, and what followed it."""

    prompt: Prompt
    segments: list[Segment] = field(default_factory=list)

    def num_routed(self) -> int:
        """The first so many tokens have routes: up to the last of the last sampled segment, which was never computed."""
        place, routed = len(self.prompt.token_ids), 0
        for segment in self.segments:
            place += len(segment)
            if segment.routes is not None:
                routed = place - 1
        return routed

    def done(self) -> tuple[Segment, ...]:
        """The segments up to the last sampled one."""
        last = max((place for place, segment in enumerate(self.segments, 1) if segment.sampled), default=0)
        return tuple(self.segments[:last])


@dataclass(slots=True, eq=False, kw_only=True)
class Episode:
    """One attempt at a member's episode, as far as it has come. No clock, no I/O."""

    member: Sample
    attempt: int = 0
    own_prompts: bool = False
    """Whether each turn begins a branch."""
    branches: list[_Branch] = field(default_factory=list)
    branch: int = 0
    """Which of them the next action belongs to."""
    turns: list[Turn] = field(default_factory=list)
    """One for each sampled segment whose consequences are known, in the order of time."""
    max_tokens: int = 0
    """Of the next action."""
    turn: Sample | None = None
    """The next action while it is made, then the last one."""
    num_turns: int = 0
    """Actions that were asked for."""
    num_sampled: int = 0
    generation_s: float = 0.0
    """Of all actions."""
    score: float = 0.0
    """Sum of the rewards."""
    environment_s: float = 0.0
    asked_s: float = 0.0
    """When the environment was asked last."""
    finish_reason: str = ""
    _action_s: float = 0.0
    """Of the last action's generation."""
    _observation: str = ""
    _state_key: str | None = None
    _wants_logprobs: bool = False
    _last_branch: int = 0
    """Of the last action."""

    @property
    def key(self) -> str:
        """Unique among the episodes of a run."""
        return f"{self.member.key}r{self.attempt}" if self.attempt else self.member.key

    def start(self) -> EpisodeStart:
        """The message that begins it."""
        task = self.member.prompt
        seed = task.metadata[SEED]
        if not isinstance(seed, int):
            raise RuntimeFault(f"task {task.index} of environment {task.source!r} has the seed {seed!r}; it must be an integer")
        return EpisodeStart(episode_id=self.key, environment=task.source, seed=seed)

    def next_turn(self, player: EpisodePlayer) -> Sample:
        """The next action, to be sampled; the engine that sampled the last one has the history cached."""
        branch, last = self.branches[self.branch], self.turn
        so_far = np.concatenate([branch.prompt.token_ids, *(segment.token_ids for segment in branch.segments)])
        held_tokens = 0
        if last is not None:
            continues = bool(branch.segments) and self._last_branch == self.branch
            held_tokens = min(last.held_tokens, len(so_far) if continues else _num_common(last.prompt.token_ids, so_far))
        self._last_branch = self.branch
        self.turn = Sample(
            owner=player,
            group_id=self.member.group_id,
            index=self.member.index,
            prompt=replace(branch.prompt, token_ids=so_far),
            prefix=self.member.prefix,
            suffix=f"{f'r{self.attempt}' if self.attempt else ''}.{self.num_turns}",
            affinity=self.member.affinity,
            sampled_before=self.num_sampled,
            engine=last.engine if last is not None else None,
            cache=last.cache if last is not None else None,
            held_tokens=held_tokens,
            num_routed=branch.num_routed(),
        )
        self.num_turns += 1
        return self.turn

    def sampled(self, completion: Completion, now_s: float) -> EpisodeAction:
        """Take an action, which is whole now; what to tell the environment."""
        self._action_s = now_s - self.turn.begun_s if self.turn is not None else 0.0
        self.generation_s += self._action_s
        self.asked_s = now_s
        self.branches[self.branch].segments.append(replace(completion.segment, number=self.num_turns - 1))
        self.num_sampled += len(completion.segment)
        self.finish_reason = completion.finish_reason
        return EpisodeAction(
            episode_id=self.key,
            token_ids=completion.segment.token_ids,
            finish_reason=completion.finish_reason,
            logprobs=completion.segment.logprobs if self._wants_logprobs else None,
        )

    def take(self, reply: EpisodeReply, now_s: float) -> None:
        """Take what the environment said now."""
        waited_s = now_s - self.asked_s
        self.environment_s += waited_s
        if self.branches:
            self._rewarded(reply, waited_s)
        branch = len(self.branches) if self.own_prompts else reply.branch
        if reply.done and not len(reply.token_ids):
            branch = self.branch
        elif branch == len(self.branches):
            self.branches.append(_Branch(prompt=replace(self.member.prompt, text=reply.observation, token_ids=reply.token_ids)))
        elif len(reply.token_ids):  # none: the prompt of a program is exactly what another sequence holds
            self.branches[branch].segments.append(Segment(token_ids=reply.token_ids, sampled=False))
        self.branch, self.max_tokens = branch, reply.max_tokens
        self._observation, self._state_key, self._wants_logprobs = reply.observation, reply.state_key, reply.wants_logprobs

    def _rewarded(self, reply: EpisodeReply, waited_s: float) -> None:
        """Take what the last action led to; what nobody read of it is left out."""
        branch = self.branches[self.branch]
        self.score += reply.reward
        if not branch.segments or not branch.segments[-1].sampled:  # it ended before the action was whole
            return
        if reply.kept_tokens == 0:
            branch.segments.pop()
            return
        if reply.kept_tokens is not None:
            branch.segments[-1] = first_tokens(branch.segments[-1], reply.kept_tokens)
        branch.segments[-1] = replace(branch.segments[-1], reward=reply.reward)
        self.turns.append(
            Turn(
                observation=self._observation,
                action=reply.action,
                reward=reply.reward,
                action_valid=reply.action_valid,
                state_key=self._state_key,
                generation_s=self._action_s,
                environment_s=waited_s,
            )
        )

    def response(self, reply: EpisodeReply, on_error: float | None) -> Response:
        """The whole episode after its last reply; without a score where it failed or has nothing to train on."""
        error = reply.error
        score = self.score if error is None else on_error
        whole = [(branch.prompt, segments) for branch in self.branches if (segments := branch.done())]
        if not whole:
            score, error = None, error or f"the episode ended ({reply.stop}) before its first action"
        solved = reply.summary.get("success", reply.summary.get("solved"))
        prompt, segments = _flat(whole) if whole else (self.member.prompt, ())
        return Response(
            prompt=prompt,
            segments=segments,
            finish_reason=self.finish_reason,
            reward=RewardResult(
                sample_id=self.key,
                score=score,
                passed=score is not None and (score > 0 if solved is None else solved > 0),
                error=error,
            ),
            episode=EpisodeRecord(
                turns=tuple(self.turns),
                stop=str(reply.stop),
                summary=dict(reply.summary),
                environment_s=self.environment_s,
                last_observation=reply.observation,
            ),
            generation_s=self.generation_s,
        )


def _flat(branches: Sequence[tuple[Prompt, tuple[Segment, ...]]]) -> tuple[Prompt, tuple[Segment, ...]]:
    """The first prompt and all segments behind it, further prompts among them."""
    (prompt, segments), *further = branches
    more = ((Segment(token_ids=other.token_ids, sampled=False, is_prompt=True), *following) for other, following in further)
    return prompt, (*segments, *chain.from_iterable(more))


def _num_common(one: IntArray, other: IntArray) -> int:
    """Length of the prefix that two sequences of token ids, shapes (n,) and (m,), share."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length


class EpisodePlayer:
    """Plays the episodes of one owner; to the fleet it is the owner of their turns."""

    def __init__(
        self,
        *,
        owner: EpisodeOwner,
        fleet: EngineFleet,
        router: EnvironmentRouter,
        rules: Mapping[str, EnvironmentRules],
        sampling: Sampling,
        seed: int,
    ) -> None:
        """Wire the parts.

        Args:
            owner: of the episodes.
            fleet: samples the actions.
            router: has the environments.
            rules: of each environment.
            sampling: of actions; each is cut where its environment says.
            seed: of the sampled actions.
        """
        self._owner, self._fleet, self._router, self._rules = owner, fleet, router, rules
        self._sampling, self._seed = sampling, seed
        self._episodes: dict[str, Episode] = {}
        self._by_member: dict[Sample, Episode] = {}
        self._by_turn: dict[Sample, Episode] = {}
        self._counters = EpisodeCounters()
        self._failed: deque[str | None] = deque(maxlen=WATCHED_EPISODES)
        """Errors of the last episodes, None where there was none."""

    @property
    def priority(self) -> int:
        """Of its owner."""
        return self._owner.priority

    def take_counters(self) -> EpisodeCounters:
        """Counters since the last call."""
        taken, self._counters = self._counters, EpisodeCounters()
        return taken

    def add(self, samples: Iterable[Sample]) -> None:
        """Have an episode played for each; it goes back to the owner once, unless it is cancelled."""
        for member in samples:
            self._begin(member)

    def cancel(self, samples: Iterable[Sample]) -> int:
        """Give episodes up without notifying the owner; those that are over are ignored.

        Returns:
            How many were withdrawn.
        """
        given_up = [episode for member in samples if (episode := self._by_member.get(member)) is not None]
        self._fleet.cancel([episode.turn for episode in given_up if episode.turn in self._by_turn and episode.turn is not None])
        for episode in given_up:
            self._forget(episode)
            self._router.end(episode.key)
        self._counters.cancelled += len(given_up)
        self._counters.tokens_cancelled += sum(episode.num_sampled for episode in given_up)
        return len(given_up)

    def request_of(self, sample: Sample) -> GenerationRequest:
        """The next part of an action."""
        episode = self._by_turn[sample]
        self._owner.on_started(episode.member)
        stops = self._sampling.stop_token_ids + self._rules[episode.member.prompt.source].stop_token_ids
        sampling = replace(
            self._sampling,
            max_tokens=min(self._sampling.max_tokens, episode.max_tokens),
            stop_token_ids=tuple(dict.fromkeys(stops)),
        )
        return sample.request(sampling, self._seed)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        """Bring actions to their environments."""
        for sample, completion in finished:
            episode = self._by_turn.pop(sample, None)
            if episode is None:  # given up by what ended together with it
                self._counters.tokens_cancelled += len(completion.segment)
                continue
            self._router.act(episode.sampled(completion, now_s()))

    def on_replies(self, replies: list[EpisodeReply]) -> None:
        """Have the next actions sampled; episodes that are over go to the owner."""
        turns: list[Sample] = []
        played: list[tuple[Sample, Response]] = []
        for reply in replies:
            episode = self._episodes.get(reply.episode_id)
            if episode is None:  # given up
                continue
            episode.take(reply, now_s())
            if reply.done:
                played.append(self._over(episode, reply))
            else:
                turn = episode.next_turn(self)
                self._by_turn[turn] = episode
                turns.append(turn)
        if turns:
            self._fleet.add(turns)
        if played:
            self._owner.on_played(played)

    def on_lost(self, episode_ids: list[str]) -> None:
        """Begin these again with their seeds; those that have been already fail."""
        failed: list[tuple[Sample, Response]] = []
        for episode_id in episode_ids:
            episode = self._episodes[episode_id]
            if episode.turn is not None and self._by_turn.pop(episode.turn, None) is not None:
                self._fleet.cancel([episode.turn])
            if episode.attempt < MAX_RESTARTS:
                self._forget(episode)
                self._counters.restarts += 1
                self._counters.tokens_cancelled += episode.num_sampled
                self._begin(episode.member, attempt=episode.attempt + 1)
                continue
            error = f"episode {episode_id}: its environment worker was lost, as when it began before; look at the workers' logs"
            no_tokens = np.zeros(0, dtype=np.int32)
            reply = EpisodeReply(episode_id=episode_id, token_ids=no_tokens, done=True, stop=StopReason.ERROR, error=error)
            failed.append(self._over(episode, reply))
        if failed:
            self._owner.on_played(failed)

    def _begin(self, member: Sample, attempt: int = 0) -> None:
        episode = Episode(member=member, attempt=attempt, own_prompts=self._rules[member.prompt.source].own_prompts)
        self._episodes[episode.key] = self._by_member[episode.member] = episode
        episode.asked_s = now_s()
        self._router.start(episode.start(), self)

    def _over(self, episode: Episode, reply: EpisodeReply) -> tuple[Sample, Response]:
        self._forget(episode)
        name = episode.member.prompt.source
        if reply.stop is StopReason.TIMEOUT:
            self._counters.timeouts[name] += 1
        if reply.stop is StopReason.ERROR:
            self._counters.errors[name] += 1
        response = episode.response(reply, self._rules[name].on_error)
        error = None if response.reward is None else response.reward.error
        self._failed.append(error)
        self._check_failures()
        return episode.member, response

    def _check_failures(self) -> None:
        """Raises EpisodesFailedError where no batch would ever be full."""
        errors = [error for error in self._failed if error is not None]
        if len(self._failed) == WATCHED_EPISODES and 2 * len(errors) > WATCHED_EPISODES:
            common, _ = Counter(errors).most_common(1)[0]
            raise EpisodesFailedError(
                f"{len(errors)} of the last {WATCHED_EPISODES} episodes failed in their environment, most often or last: {common}; "
                "correct the environment, or give it more time (environments[].stepTimeoutSeconds)"
            )

    def _forget(self, episode: Episode) -> None:
        del self._episodes[episode.key]
        del self._by_member[episode.member]
        if episode.turn is not None:
            self._by_turn.pop(episode.turn, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environments:
    """What episodes are played in."""

    router: EnvironmentRouter
    rules: Mapping[str, EnvironmentRules]
    take_metrics: Callable[[], dict[str, float]] = dict
    """Metrics of their workers since the last call."""

    def player(self, owner: EpisodeOwner, fleet: EngineFleet, sampling: Sampling, seed: int) -> EpisodePlayer:
        """What plays the episodes of one owner."""
        return EpisodePlayer(owner=owner, fleet=fleet, router=self.router, rules=self.rules, sampling=sampling, seed=seed)
