"""Engines and environment workers in virtual time whose every token is a function of all tokens before it, so that a mistake shows."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljob_runtime.environments.messages import EpisodeAction, EpisodeEnd, EpisodeReply, EpisodeStart, StopReason
from rljob_runtime.errors import DeadlineError, WorkerLostError
from rljob_runtime.records import GenerationRequest, Trajectory
from tests.support.records import make_segment
from tests.support.timed_engine import TimedEngine

STOP_TOKEN = 0
NUM_ACTION_TOKENS = 4
FIRST_GIVEN_TOKEN = 1000
"""Environments write tokens from here on, engines lower ones."""


def number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest())


def action_token(before: Sequence[int]) -> int:
    """What every engine samples behind these tokens."""
    return number(tuple(before)) % NUM_ACTION_TOKENS


def first_prompt(seed: int) -> list[int]:
    return [FIRST_GIVEN_TOKEN + number(seed, i) % 500 for i in range(1 + seed % 3)]


def observation(seed: int, turn: int, action: Sequence[int]) -> list[int]:
    """What an environment shows after an action; sometimes nothing."""
    return [FIRST_GIVEN_TOKEN + number(seed, turn, tuple(action), i) % 500 for i in range(number(seed, turn) % 4)]


def own_prompt(seed: int, turn: int, action: Sequence[int]) -> list[int]:
    """What comes before the next action where turns are prompts of their own."""
    return [FIRST_GIVEN_TOKEN, *observation(seed, turn, action)]


def reward(seed: int, turn: int, action: Sequence[int]) -> float:
    return number("reward", seed, turn, tuple(action)) % 5 / 4


class ActingEngine(TimedEngine):
    """Samples the tokens of ``action_token`` up to a stop token or the limit."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__(name, **settings)
        self._sampled: dict[str, list[int]] = {}

    def _draw(self, request_id: str) -> None:
        request, versions = self.running[request_id]
        sampled = self._sampled.setdefault(request_id, [])
        sampled.append(action_token([*request.prompt_token_ids.tolist(), *sampled]))
        versions.append(self.version)
        if sampled[-1] in request.sampling.stop_token_ids:
            self._give(request_id, "stop")
        elif len(sampled) == request.sampling.max_tokens:
            self._give(request_id, "length")

    def _give(self, request_id: str, finish: str) -> None:
        _, versions = self.running.pop(request_id)
        sampled = self._sampled.pop(request_id, [])
        logprobs = [-0.1 * (token + 1) - version for token, version in zip(sampled, versions, strict=True)]
        self._back.append(completion(request_id, sampled, logprobs, versions, finish))


def completion(request_id: str, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], finish: str) -> Any:
    from rljob_runtime.records import Completion

    return Completion(request_id=request_id, segment=make_segment(tokens, logprobs=logprobs, versions=versions), finish_reason=finish)


@dataclass(frozen=True, kw_only=True)
class Script:
    """What the environments of a worker do, by the seed of the task."""

    turns: Callable[[int], int] = lambda seed: 1 + seed % 4
    delay_s: Callable[[int, int], float] = lambda seed, turn: 0.1
    """By seed and turn, 0 for the reset."""
    fails_at: Callable[[int], int | None] = lambda seed: None
    """The turn at which it raises."""
    max_tokens: int = 3
    own_prompts: frozenset[str] = frozenset()
    """Environments whose turns are prompts of their own."""


class ScriptedEnvironments:
    """An environment worker; replies come when their delay is over."""

    log_file = "environments.log"

    def __init__(
        self,
        name: str,
        script: Script,
        *,
        dies_at_s: float = float("inf"),
        hangs_at_s: float = float("inf"),
        stops_at_s: float = float("inf"),
        again_at_s: Sequence[float] = (),
    ) -> None:
        """When it ends, replies no more, or answers no call; ``again_at_s``: when the processes die that take its place, one by one."""
        self.name = name
        self.stacks = 0
        self._hangs_at_s, self._stops_at_s = hangs_at_s, stops_at_s
        self._again_at_s = list(again_at_s)
        self.script = script
        self.started: list[EpisodeStart] = []
        self.ended: list[str] = []
        self._dies_at_s = dies_at_s
        self._episodes: dict[str, tuple[int, int]] = {}
        """Seed and turn."""
        self._own_prompts: set[str] = set()
        """Episodes."""
        self._due: list[tuple[float, EpisodeReply]] = []

    @property
    def running(self) -> set[str]:
        return set(self._episodes)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                if method == "collect":
                    return await self._collect(*args)
                await asyncio.sleep(0)
                await self._live()
        except TimeoutError as error:
            raise DeadlineError(f"worker {self.name} did not finish {method} within {timeout_s:.0f} s") from error
        return getattr(self, method)(*args)

    def restart(self) -> None:
        """Another process takes its place."""
        self._dies_at_s = self._again_at_s.pop(0) if self._again_at_s else float("inf")
        self._hangs_at_s = self._stops_at_s = float("inf")
        self._episodes, self._due = {}, []

    def print_stacks(self) -> None:
        self.stacks += 1

    def submit(self, messages: Sequence[EpisodeStart | EpisodeAction | EpisodeEnd]) -> None:
        for message in messages:
            if isinstance(message, EpisodeStart):
                assert message.episode_id not in self._episodes
                self.started.append(message)
                if message.environment in self.script.own_prompts:
                    self._own_prompts.add(message.episode_id)
                self._answer(message.episode_id, message.seed, 0, ())
            elif isinstance(message, EpisodeEnd):
                self.ended.append(message.episode_id)
                self._episodes.pop(message.episode_id, None)
            else:
                seed, turn = self._episodes[message.episode_id]
                self._answer(message.episode_id, seed, turn + 1, message.token_ids.tolist())

    def _answer(self, key: str, seed: int, turn: int, action: Sequence[int]) -> None:
        self._episodes[key] = (seed, turn)
        script = self.script
        following = own_prompt if key in self._own_prompts else observation
        given = first_prompt(seed) if turn == 0 else following(seed, turn, action)
        done, stop, error = turn >= script.turns(seed), StopReason.DONE, None
        if script.fails_at(seed) == turn:
            done, stop, error = True, StopReason.ERROR, f"seed {seed} raised"
        reply = EpisodeReply(
            episode_id=key,
            token_ids=np.array([] if done else given, dtype=np.int32),
            reward=reward(seed, turn, action) if turn and error is None else 0.0,
            done=done,
            stop=stop if done else StopReason.NOT_YET,
            error=error,
            turn=turn,
            observation=f"{seed}:{turn}",
            max_tokens=0 if done else script.max_tokens,
            summary={"success": float(seed % 2)} if done else {},
            state_key=f"{seed}/{turn}",
        )
        self._due.append((_now_s() + script.delay_s(seed, turn), reply))

    async def _collect(self, wait_s: float) -> list[EpisodeReply]:
        until_s = _now_s() + wait_s
        while True:
            await self._live()
            if _now_s() >= self._hangs_at_s:
                await asyncio.sleep(wait_s)
                return []
            ready = [reply for at_s, reply in self._due if at_s <= _now_s() and reply.episode_id in self._episodes]
            self._due = [(at_s, reply) for at_s, reply in self._due if at_s > _now_s()]
            for reply in ready:
                if reply.done:
                    del self._episodes[reply.episode_id]
            if ready or _now_s() >= until_s:
                return ready
            await asyncio.sleep(max(min([until_s, self._dies_at_s, _now_s() + 0.05, *(at_s for at_s, _ in self._due)]) - _now_s(), 0.0))

    async def _live(self) -> None:
        if _now_s() >= self._dies_at_s:
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        if _now_s() >= self._stops_at_s:
            await asyncio.Event().wait()


def check_exact(trajectory: Trajectory) -> None:
    """Every token is what an engine or the environment wrote behind exactly the tokens before it; rewards are those of the actions."""
    seed = trajectory.prompt.metadata["seed"]
    assert isinstance(seed, int)
    so_far = trajectory.prompt.token_ids.tolist()
    assert so_far == first_prompt(seed)
    turn = 0
    segments = list(trajectory.segments)
    assert segments[-1].sampled
    while segments:
        action = segments.pop(0)
        turn += 1
        assert action.sampled
        for token, logprob, version in zip(action.token_ids.tolist(), action.logprobs.tolist(), versions_of(action), strict=True):
            assert token == action_token(so_far)
            assert logprob == float(np.float32(-0.1 * (token + 1) - version))
            so_far.append(token)
        tokens = action.token_ids.tolist()
        assert action.reward == reward(seed, turn, tokens)
        own = bool(segments) and segments[0].is_prompt
        shown = (own_prompt if own else observation)(seed, turn, tokens)
        if segments and shown:
            given = segments.pop(0)
            assert not given.sampled
            assert given.token_ids.tolist() == shown
            so_far = shown if own else so_far + shown


def versions_of(segment: Any) -> list[int]:
    return [span.version for span in segment.version_spans for _ in range(span.start, span.end)]


def prompt_request_tokens(request: GenerationRequest) -> list[int]:
    return request.prompt_token_ids.tolist()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
