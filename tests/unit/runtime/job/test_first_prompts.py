"""Episodes that begin only to be probed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rljob_runtime.environments.worker import EnvironmentWorker
from rljob_runtime.job import episodes
from rljob_runtime.overlap.tasks import TRAINING, TaskOrder
from tests.support.environments import environment_config, environment_worker

GAME = """
from rljob_runtime.environments.protocol import Turn


class Game:
    def reset(self, seed):
        return f"seed {seed}"

    def step(self, action):
        return Turn(observation="over", done=True)

    def close(self):
        pass
"""


class Local:
    """An environment worker of this process."""

    name, log_file = "environment-0", "environment.log"

    def __init__(self, worker: EnvironmentWorker) -> None:
        self._worker = worker

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await asyncio.to_thread(getattr(self._worker, method), *args)


def first(folder: Path) -> list[str]:
    (folder / "games.py").write_text(GAME)
    config = environment_config("game", kind="games:Game", isolation={"max_processes": 1})
    worker = environment_worker([config], folder)
    tasks = TaskOrder({"game": 1.0}, seed=0, purpose=TRAINING).next(3)
    try:
        found = asyncio.run(episodes.first_prompts(SimpleNamespace(environments=[Local(worker)]), tasks))  # type: ignore[arg-type]
    finally:
        worker.close()
    return [prompt.text for prompt in found]


def test_episodes_that_share_one_process_begin_one_after_the_other(tmp_path: Path) -> None:
    assert len(set(first(tmp_path))) == 3
