"""What sending turns to the engine that has their history cached saves: the real scheduler and fleet, engines in virtual time.

An engine's step takes a constant and a part for each token that it computes, of prompts and of responses; the beginning of a prompt that
the engine computed before is cached in whole blocks. Two profiles of machines: where tokens cost most (a CPU, long batches on a GPU), and
where the constant does (a GPU with few requests).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rljob_runtime.environments.messages import EpisodeAction, EpisodeEnd, EpisodeReply, EpisodeStart, StopReason
from rljob_runtime.job.learning_settings import engine_capacity
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, Environments
from rljob_runtime.overlap.fleet import FleetConfig
from rljob_runtime.overlap.routing import AFFINITY_MARGIN
from rljob_runtime.overlap.scheduler import RolloutConfig, RolloutScheduler
from rljob_runtime.overlap.staleness import StalenessGate
from rljob_runtime.overlap.tasks import TRAINING, TaskOrder
from rljob_runtime.packed import CompletionBatch, pack
from rljob_runtime.records import Completion, GenerationRequest, Sampling, Segment, VersionSpan
from tests.support.virtual_time import run_virtual

BLOCK = 16
"""Tokens of a block of keys and values."""
GROUPS, SAMPLES, TURNS = 16, 8, 10
FIRST_TOKENS, OBSERVATION_TOKENS = 400, 100
DEADLINE_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What an engine's step takes."""

    name: str
    step_s: float
    token_s: float


MACHINES = (
    Machine(name="a token", step_s=0.004, token_s=0.0002),
    Machine(name="a step", step_s=0.015, token_s=0.00002),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One configuration."""

    machine: Machine
    engines: int = 2
    slots: int = 32
    response_tokens: int = 32
    """Mean; they vary from none to twice as many."""
    environment_s: float = 0.2
    """Mean of a step; they vary as exponential ones do."""
    margin: int = AFFINITY_MARGIN
    """0: by load alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a batch took."""

    world: World
    wall_s: float
    prompt_tokens: int
    cached_tokens: int

    def row(self) -> dict[str, object]:
        return asdict(self)


def chance(*parts: object) -> np.random.Generator:
    """Random numbers that are a function of ``parts``."""
    return np.random.default_rng(zlib.crc32(repr(parts).encode()))


class CachingEngine:
    """Continuous batching with a prefix cache that never fills."""

    log_file = ""

    def __init__(self, index: int, world: World) -> None:
        self.name, self._world = f"engine-{index}", world
        self.prompt_tokens = self.cached_tokens = 0
        self._waiting: list[GenerationRequest] = []
        self._running: dict[str, int] = {}
        """Tokens left."""
        self._requests: dict[str, GenerationRequest] = {}
        self._cached: dict[str, int] = {}
        """Tokens by episode."""
        self._back: list[Completion] = []
        self._changed = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    async def call(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """A call of a worker."""
        if method == "submit":
            self._waiting += payload
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._step_while_busy())
            return None
        return await self._collect(payload)

    async def _collect(self, max_wait_s: float) -> CompletionBatch:
        if not self._back:
            self._changed.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return pack([])
        back, self._back = self._back, []
        return pack(back)

    async def _step_while_busy(self) -> None:
        while self._waiting or self._running:
            new, self._waiting = (
                self._waiting[: self._world.slots - len(self._running)],
                self._waiting[self._world.slots - len(self._running) :],
            )
            computed = len(self._running) + sum(self._begin(request) for request in new)
            await asyncio.sleep(self._world.machine.step_s + self._world.machine.token_s * computed)
            for request_id in list(self._running):
                self._running[request_id] -= 1
                if not self._running[request_id]:
                    self._end(request_id)

    def _begin(self, request: GenerationRequest) -> int:
        """Tokens of its prompt that are to be computed."""
        key, length = request.request_id.split(".")[0], len(request.prompt_token_ids)
        cached = min(self._cached.get(key, 0), length - 1) // BLOCK * BLOCK
        self.prompt_tokens += length
        self.cached_tokens += cached
        self._running[request.request_id] = int(chance(request.request_id).integers(1, 2 * self._world.response_tokens + 1))
        self._requests[request.request_id] = request
        return length - cached

    def _end(self, request_id: str) -> None:
        del self._running[request_id]
        request = self._requests.pop(request_id)
        length = int(chance(request_id).integers(1, 2 * self._world.response_tokens + 1))
        self._cached[request_id.split(".")[0]] = len(request.prompt_token_ids) + length
        segment = Segment(
            token_ids=np.zeros(length, dtype=np.int32),
            sampled=True,
            logprobs=np.zeros(length, dtype=np.float32),
            version_spans=(VersionSpan(start=0, end=length, version=0),),
        )
        self._back.append(Completion(request_id=request_id, segment=segment, finish_reason="stop"))
        self._changed.set()


class SlowGames:
    """An environment worker: each step takes its time, all at once."""

    name, log_file = "games", ""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turns: dict[str, int] = {}
        self._ready: list[EpisodeReply] = []
        self._changed = asyncio.Event()

    async def call(self, method: str, payload: Any, *, timeout_s: float) -> Any:
        """A call of a worker."""
        if method == "submit":
            self._submit(payload)
            return None
        if not self._ready:
            self._changed.clear()
            try:
                async with asyncio.timeout(payload):
                    await self._changed.wait()
            except TimeoutError:
                return []
        ready, self._ready = self._ready, []
        return ready

    def _submit(self, messages: Sequence[EpisodeStart | EpisodeAction | EpisodeEnd]) -> None:
        for message in messages:
            if isinstance(message, EpisodeEnd):
                continue
            turn = self._turns[message.episode_id] = self._turns.get(message.episode_id, -1) + 1
            wait_s = self._world.environment_s * float(chance(message.episode_id, turn).exponential())
            asyncio.get_running_loop().call_later(wait_s, self._answer, message.episode_id, turn)

    def _answer(self, episode_id: str, turn: int) -> None:
        done = turn == TURNS
        given = 0 if done else OBSERVATION_TOKENS if turn else FIRST_TOKENS
        self._ready.append(
            EpisodeReply(
                episode_id=episode_id,
                token_ids=np.zeros(given, dtype=np.int32),
                done=done,
                stop=StopReason.DONE if done else StopReason.NOT_YET,
                turn=turn,
                max_tokens=0 if done else 1000,
            )
        )
        self._changed.set()


def play(world: World) -> Saved:
    """One batch of episodes, and as many again that begin meanwhile."""
    return run_virtual(_play(world))  # type: ignore[no-any-return]


async def _play(world: World) -> Saved:
    engines = [CachingEngine(index, world) for index in range(world.engines)]
    scheduler = RolloutScheduler(
        prompts=TaskOrder({"game": 1.0}, seed=0, purpose=TRAINING),
        engines=engines,  # type: ignore[arg-type]
        environments=Environments(
            router=EnvironmentRouter([SlowGames(world)], timeouts_s={"game": DEADLINE_S}),  # type: ignore[list-item]
            rules={"game": EnvironmentRules()},
        ),
        gate=StalenessGate(groups_per_step=GROUPS, async_generation_ratio=1, max_staleness=1, total_groups=2 * GROUPS),
        config=RolloutConfig(
            samples_per_prompt=SAMPLES,
            sampling=Sampling(max_tokens=1000),
            seed=0,
            fleet=FleetConfig(
                capacities=(engine_capacity(world.slots),) * world.engines, stall_timeout_s=DEADLINE_S, affinity_margin=world.margin
            ),
        ),
    )
    running = asyncio.create_task(scheduler.run())
    scheduler.open()
    await scheduler.buffer.take(GROUPS, version=0, timeout_s=DEADLINE_S, what="a batch")
    wall_s = asyncio.get_running_loop().time()
    prompt, cached = sum(engine.prompt_tokens for engine in engines), sum(engine.cached_tokens for engine in engines)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return Saved(world=world, wall_s=wall_s, prompt_tokens=prompt, cached_tokens=cached)


def compared() -> list[tuple[Saved, Saved]]:
    """By load alone, and with affinity; for both machines, 2 and 4 engines, and slots for a part or for all of the episodes."""
    pairs = []
    for machine in MACHINES:
        for engines in (2, 4):
            for slots in (128 // engines // 4, 128 // engines, 512 // engines):
                world = World(machine=machine, engines=engines, slots=slots)
                pairs.append((play(replace(world, margin=0)), play(world)))
    return pairs
