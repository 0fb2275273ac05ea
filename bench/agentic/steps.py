"""Steps per second of bare environments, of the worker in batches, and of a user's class in processes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import gymnasium
import numpy as np
from transformers import PreTrainedTokenizerBase

from rljob_runtime.environments.builtin import make_task
from rljob_runtime.environments.config import EnvironmentConfig, Isolation, WorkerConfig
from rljob_runtime.environments.messages import EpisodeAction, EpisodeReply, EpisodeStart
from rljob_runtime.environments.worker import EnvironmentWorker
from rljob_runtime.tiny.tokenizer import build_tokenizer

LAKE = {"is_slippery": False}
BOXES = {"dim_room": [6, 6], "num_boxes": 1, "max_steps": None}
GROUP = 8
"""Episodes of one seed, one after the other, as a job starts them."""
NAMES = ("Left", "Down", "Right", "Up")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USERS_CLASS = '''
import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map


class Lake(gymnasium.Env):
    """The lake as a class of the user's: texts in, texts out."""

    def reset(self, seed=None, options=None):
        self.lake = gymnasium.make("FrozenLake-v1", desc=generate_random_map(4, seed=seed), is_slippery=False)
        return str(self.lake.reset(seed=seed)[0]), {}

    def step(self, action):
        place, reward, terminated, truncated, _ = self.lake.step("LDRU".find(action[8:9]) % 4)
        return str(place), reward, terminated, truncated, {}
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """One measurement."""

    subject: str
    episodes: int
    """At the same time."""
    steps: int
    wall_s: float
    cpu_s: float
    """CPU time of this process; for a user's class without its processes."""
    environment_s: float
    """Inside the environments, resets included."""

    def row(self) -> dict[str, object]:
        return asdict(self) | {"steps_per_s": self.steps / self.wall_s, "us_per_step": self.wall_s / self.steps * 1e6}


def bare(subject: str, reset: Callable[[int], object], step: Callable[[int], bool], num_steps: int) -> Rate:
    """An environment on its own, one episode after the other, at most ten actions each."""
    chance = np.random.default_rng(0)
    actions = chance.integers(4, size=num_steps).tolist()
    started, cpu, seed, taken = time.perf_counter(), time.process_time(), 0, 10
    for action in actions:
        if taken >= 10:
            reset(seed)
            seed, taken = seed + 1, 0
        taken = 10 if step(action) else taken + 1
    wall_s = time.perf_counter() - started
    return Rate(subject=subject, episodes=1, steps=num_steps, wall_s=wall_s, cpu_s=time.process_time() - cpu, environment_s=wall_s)


def bare_gymnasium(num_steps: int) -> Rate:
    """``gymnasium.make`` with one map: its own fastest way, which renders no text."""
    lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
    return bare(
        "gymnasium.make, one map, no text", lambda seed: lake.reset(seed=seed), lambda action: any(lake.step(action)[2:4]), num_steps
    )


def bare_task(kind: str, parameters: Mapping[str, object], num_steps: int) -> Rate:
    """A built-in environment without a worker."""
    task = make_task(kind, parameters)
    texts = [f"<answer>{name}</answer>" for name in NAMES]
    return bare(f"{kind}, text, without a worker", task.reset, lambda action: task.step(texts[action]).done, num_steps)


def worker_rate(subject: str, kind: str, parameters: Mapping[str, object], *, episodes: int, num_steps: int) -> Rate:
    """Episodes at the same time in one worker; every reply is answered at once."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bench_lake.py").write_text(USERS_CLASS)
        tokenizer = build_tokenizer(["<answer>Right</answer> <answer>Left</answer> Up Down P_O"], vocab_size=512)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
        entry = EnvironmentConfig(
            name="bench",
            type=kind,
            parameters=parameters,
            max_turns=10,
            max_tokens_per_turn=64,
            max_episode_tokens=8192,
            isolation=Isolation(max_processes=8, episodes_per_process=-(-episodes // 8)),
        )
        config = WorkerConfig(environments=(entry,), tokenizer_path="", job_folder=Path(folder), log_dir=Path(folder))
        worker = EnvironmentWorker(config, tokenizer)
        try:
            return _drive(subject, worker, tokenizer, episodes, num_steps)
        finally:
            worker.close()


def _drive(subject: str, worker: EnvironmentWorker, tokenizer: PreTrainedTokenizerBase, episodes: int, num_steps: int) -> Rate:
    actions = [np.asarray(tokenizer.encode(f"<answer>{name}</answer><|im_end|>"), dtype=np.int32) for name in NAMES]
    started_episodes = 0

    def start() -> EpisodeStart:
        nonlocal started_episodes
        started_episodes += 1
        return EpisodeStart(episode_id=str(started_episodes), environment="bench", seed=started_episodes // GROUP)

    def answer(reply: EpisodeReply) -> EpisodeAction | EpisodeStart:
        if reply.error:
            raise RuntimeError(reply.error)
        return (
            start()
            if reply.done
            else EpisodeAction(
                episode_id=reply.episode_id, token_ids=actions[(int(reply.episode_id) + reply.turn) % 4], finish_reason="stop"
            )
        )

    worker.submit([start() for _ in range(episodes)])
    done = 0
    while done < episodes:  # everyone is there before the clock starts
        replies = worker.collect(60.0)
        done += len(replies)
        worker.submit([answer(reply) for reply in replies])
    before, started, cpu = worker.metrics(), time.perf_counter(), time.process_time()
    while worker.metrics()["steps"] < before["steps"] + num_steps:
        worker.submit([answer(reply) for reply in worker.collect(60.0)])
    wall_s, after = time.perf_counter() - started, worker.metrics()
    return Rate(
        subject=subject,
        episodes=episodes,
        steps=int(after["steps"] - before["steps"]),
        wall_s=wall_s,
        cpu_s=time.process_time() - cpu,
        environment_s=sum(after[name] - before[name] for name in ("step_s", "reset_s")),
    )
