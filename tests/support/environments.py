"""Environment workers in the test's own process, played by a policy that answers the texts."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.config import EnvironmentConfig, HarnessConfig, Isolation, WorkerConfig
from rljob_runtime.environments.messages import EpisodeAction, EpisodeEnd, EpisodeReply, EpisodeStart
from rljob_runtime.environments.worker import EnvironmentWorker
from tests.support.chat_tokenizers import chat_tokenizer

LIMIT_S = 30.0


def environment_config(name: str = "lake", kind: str = "FrozenLake", **changes) -> EnvironmentConfig:
    given = {"parameters": {}, "max_turns": 10, "max_tokens_per_turn": 32, "max_episode_tokens": 4096} | changes
    if "command" in given:
        given["harness"] = HarnessConfig(command=given.pop("command"), **given.pop("harness", {}))
        kind = "Harness"
    if "isolation" in given:
        given["isolation"] = Isolation(**given["isolation"])
    return EnvironmentConfig(name=name, type=kind, **given)


def environment_worker(configs: Sequence[EnvironmentConfig], folder: Path, template: str = "chatml") -> EnvironmentWorker:
    config = WorkerConfig(environments=tuple(configs), tokenizer_path="", job_folder=folder, log_dir=folder / "logs")
    return EnvironmentWorker(config, chat_tokenizer(template))


def tokens(text: str, *, close: str = "<|im_end|>") -> np.ndarray:
    """Ids of a response, with the token that closes it."""
    tokenizer = chat_tokenizer("chatml")
    closing = [tokenizer.convert_tokens_to_ids(close)] if close else []
    return np.asarray([*tokenizer.encode(text), *closing], dtype=np.int32)


def plain_prompt(**settings) -> PromptSettings:
    return PromptSettings(chat_template=False, turn="{observation}\n", **settings)


class ShiftedClock:
    """In place of ``time.monotonic`` in this process: a test lets deadlines pass by a shift, not by waiting."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.shift_s = 0.0
        self.real = time.monotonic
        patch.setattr(time, "monotonic", lambda: self.real() + self.shift_s)


class Player:
    """Sends messages and keeps what comes back, by episode."""

    def __init__(self, worker: EnvironmentWorker) -> None:
        self.worker = worker
        self.replies: dict[str, list[EpisodeReply]] = {}

    def start(self, key: str, seed: int = 0, environment: str = "lake") -> None:
        self.worker.submit([EpisodeStart(episode_id=key, environment=environment, seed=seed)])

    def act(self, key: str, text: str) -> None:
        self.worker.submit([EpisodeAction(episode_id=key, token_ids=tokens(text), finish_reason="stop")])

    def end(self, key: str) -> None:
        self.worker.submit([EpisodeEnd(episode_id=key)])

    def wait(self, key: str, count: int = 1) -> EpisodeReply:
        """The reply number ``count`` of an episode."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.replies.get(key, ())) < count:
            assert time.monotonic() < deadline, f"{key} has {len(self.replies.get(key, ()))} replies of {count}"
            self.collect()
        return self.replies[key][count - 1]

    def collect(self) -> None:
        for reply in self.worker.collect(1.0):
            self.replies.setdefault(reply.episode_id, []).append(reply)

    def play(self, key: str, texts: Sequence[str], seed: int = 0, environment: str = "lake") -> list[EpisodeReply]:
        """An episode to its end, or to the end of the texts."""
        self.start(key, seed, environment)
        self.wait(key)
        for number, text in enumerate(texts):
            if self.replies[key][-1].done:
                break
            self.act(key, text)
            self.wait(key, number + 2)
        return self.replies[key]

    def play_all(self, keys: Sequence[str], policy: Callable[[EpisodeReply], str], environment: str = "lake") -> None:
        """Many episodes at the same time, seeds in order, to their ends."""
        self.worker.submit([EpisodeStart(episode_id=key, environment=environment, seed=seed) for seed, key in enumerate(keys)])
        answered = dict.fromkeys(keys, 0)
        deadline = time.monotonic() + LIMIT_S
        while not all(self.replies.get(key, [None])[-1] and self.replies[key][-1].done for key in keys):
            assert time.monotonic() < deadline, {key: self.replies.get(key, [None])[-1] for key in keys}
            self.collect()
            for key in keys:
                if len(self.replies.get(key, ())) > answered[key]:
                    answered[key] += 1
                    if not self.replies[key][-1].done:
                        self.act(key, policy(self.replies[key][-1]))
