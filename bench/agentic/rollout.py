"""Episodes with a real engine: what a turn costs beside the engine's and the environment's own time, and what stays cached.

Driver, engines and environment worker are processes of their own, as in a job, without Ray between them. The model is one of 0.3 million
parameters with random weights, so that a turn's cost is that of everything around it, and every episode has all its turns: what it writes
names no action.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.agentic.processes import ProcessWorker
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.config import EnvironmentConfig, WorkerConfig
from rljob_runtime.job.learning_settings import engine_capacity
from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, EpisodePlayer
from rljob_runtime.overlap.fleet import EngineFleet, FleetConfig
from rljob_runtime.overlap.routing import AFFINITY_MARGIN
from rljob_runtime.overlap.samples import Response, Sample
from rljob_runtime.overlap.tasks import TRAINING, TaskOrder
from rljob_runtime.records import Sampling

GAME, MAX_TURNS, ACTION_TOKENS = "lake", 10, 5
START_TIMEOUT_S = 180.0
CELLS = {"0": " P", "1": " F", "2": " H", "3": " G", "4": " X", "5": " W"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One measurement."""

    episodes: int
    """At the same time; one that ends is followed by another."""
    engines: int = 1
    slots: int = 256
    size: int = 4
    """Side of the lake."""
    margin: int = AFFINITY_MARGIN
    turns: int = 2000
    """That are measured."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of an episode."""
        return (self.size * (self.size + 1) + ACTION_TOKENS + 4) * (MAX_TURNS + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What they took."""

    setting: Setting
    turns: int
    wall_s: float
    engine_s: float
    """In which engines computed, summed over them."""
    environment_s: float
    """Inside the environment: steps and resets."""
    prompt_tokens: float
    cached_tokens: float

    def row(self) -> dict[str, object]:
        return asdict(self) | {"overhead_share": self.overhead_share}

    @property
    def overhead_share(self) -> float:
        """Wall time above that of engine and environment one after the other; below 0 where they overlap."""
        return self.wall_s / (self.engine_s / self.setting.engines + self.environment_s) - 1


def make_model(folder: Path) -> str:
    """The model and its tokenizer, made once."""
    if not (folder / "config.json").exists():
        from transformers import Qwen2Config, Qwen2ForCausalLM

        from rljob_runtime.tiny.lake import lake_tokenizer

        tokenizer = lake_tokenizer()
        shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), max_position_embeddings=8192, eos_token_id=None, **shape))
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
    return str(folder)


def make_engine(model: str, slots: int, max_tokens: int) -> Any:
    """In the engine's process."""
    from rljob_runtime.engine.vllm.engine import VllmEngine
    from rljob_runtime.engine.vllm.environment import apply_environment

    config = EngineConfig(model_path=model, max_model_len=max_tokens, max_num_seqs=slots, kv_cache_bytes=1 << 30, threads=1)
    apply_environment(config)
    return VllmEngine(config)


def make_games(config: WorkerConfig) -> Any:
    """In the environment worker's process."""
    from rljob_runtime.environments.worker import EnvironmentWorker

    return EnvironmentWorker(config)


class Players:
    """Keeps so many episodes going."""

    priority = 1

    def __init__(self, fleet: EngineFleet, router: EnvironmentRouter) -> None:
        rules = {GAME: EnvironmentRules()}
        sampling = Sampling(max_tokens=ACTION_TOKENS)
        self.player = EpisodePlayer(owner=self, fleet=fleet, router=router, rules=rules, sampling=sampling, seed=0)
        self._tasks = TaskOrder({GAME: 1.0}, seed=0, purpose=TRAINING)
        self._ended = asyncio.Event()
        self.turns = 0

    def begin(self, count: int) -> None:
        """So many more."""
        self.player.add([Sample(owner=self, group_id=task.index, index=0, prompt=task) for task in self._tasks.next(count)])  # type: ignore[arg-type]

    def on_started(self, sample: Sample) -> None:
        """A turn begins."""

    def on_played(self, played: list[tuple[Sample, Response]]) -> None:
        """Others follow."""
        for _, response in played:
            assert response.episode is not None
            assert response.reward is not None
            if response.reward.error:
                raise RuntimeError(response.reward.error)
            self.turns += len(response.episode.turns)
        self.begin(len(played))
        self._ended.set()

    async def until(self, turns: int) -> None:
        """Wait for so many turns of ended episodes."""
        while self.turns < turns:
            self._ended.clear()
            await self._ended.wait()


def measure(settings: Sequence[Setting], work: Path) -> Iterator[Turns]:
    """Those with as many engines, slots and sizes share processes."""
    model = make_model(work / "model")
    for setting in settings:
        yield asyncio.run(_measured(setting, model, work))


async def _measured(setting: Setting, model: str, work: Path) -> Turns:
    engines = [
        ProcessWorker(f"engine-{index}", "bench.agentic.rollout:make_engine", model, setting.slots, setting.max_tokens + 64)
        for index in range(setting.engines)
    ]
    entry = EnvironmentConfig(
        name=GAME,
        type="FrozenLake",
        parameters={"size": setting.size, "is_slippery": False, "grid_lookup": CELLS},
        prompt=PromptSettings(chat_template=False, instruction="", turn="{observation}\n"),
        max_turns=MAX_TURNS,
        max_tokens_per_turn=ACTION_TOKENS,
        max_episode_tokens=setting.max_tokens,
    )
    games = ProcessWorker(
        "games", "bench.agentic.rollout:make_games", WorkerConfig(environments=(entry,), tokenizer_path=model, log_dir=work)
    )
    workers = [*engines, games]
    try:
        await asyncio.gather(
            *(w.call("stats", timeout_s=START_TIMEOUT_S) for w in engines), games.call("metrics", timeout_s=START_TIMEOUT_S)
        )
        return await _played(setting, engines, games)
    finally:
        for worker in workers:
            worker.stop()


async def _played(setting: Setting, engines: Sequence[ProcessWorker], games: ProcessWorker) -> Turns:
    capacities = (engine_capacity(setting.slots),) * setting.engines
    fleet = EngineFleet(
        engines,  # type: ignore[arg-type]
        config=FleetConfig(capacities=capacities, stall_timeout_s=60.0, affinity_margin=setting.margin),
    )
    router = EnvironmentRouter([games], timeouts_s={GAME: 60.0})  # type: ignore[list-item]
    players = Players(fleet, router)

    async def body() -> Turns:
        players.begin(setting.episodes)
        await players.until(max(setting.turns // 5, setting.episodes * MAX_TURNS // 2))  # until episodes are out of step
        before, began_s, first = await _counted(engines, games), time.perf_counter(), players.turns
        await players.until(first + setting.turns)
        wall_s, turns = time.perf_counter() - began_s, players.turns - first
        after = await _counted(engines, games)
        return Turns(setting=setting, turns=turns, wall_s=wall_s, **{name: after[name] - before[name] for name in after})

    return await _beside(body(), fleet.run(), router.run())


async def _beside(body: Coroutine[Any, Any, Turns], *services: Coroutine[Any, Any, None]) -> Turns:
    """The result of ``body``; the first failure of any."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(service) for service in services]
        result = await tasks.create_task(body)
        for task in running:
            task.cancel()
    return result


async def _counted(engines: Sequence[ProcessWorker], games: ProcessWorker) -> dict[str, float]:
    stats = [await engine.call("stats", timeout_s=60.0) for engine in engines]
    played = await games.call("metrics", timeout_s=60.0)
    return {
        "engine_s": sum(found["busy_s"] for found in stats),
        "environment_s": played["step_s"] + played["reset_s"],
        "prompt_tokens": sum(found["prompt_tokens"] for found in stats),
        "cached_tokens": sum(found["cached_tokens"] for found in stats),
    }
