"""An environment of the user's own, by its name module:Class."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_runtime.environments.protocol import Turn, make_environment
from rljob_runtime.errors import PluginError
from tests.support.environments import Player, environment_config, environment_worker

PLUGIN = '''
from rljob_runtime.environments.protocol import Turn


class Countdown:
    """Solved by saying how many are left."""

    def __init__(self, start):
        self.start = start

    async def reset(self, seed):
        self.left = self.start + seed
        return f"{self.left} left"

    async def step(self, action):
        right = action == str(self.left)
        self.left -= 1
        return Turn(observation=f"{self.left} left", reward=float(right), done=self.left == 0, info={"left": float(self.left)})

    async def close(self):
        self.left = 0


class Silent:
    async def reset(self, seed):
        return ""
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_environment.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_environment", None)


def test_an_environment_is_constructed_with_its_parameters_and_played(folder: Path) -> None:
    environment = make_environment("my_environment:Countdown", folder, {"start": 2})

    async def episode() -> list[Turn]:
        assert await environment.reset(1) == "3 left"
        turns = [await environment.step(action) for action in ("3", "nothing", "1")]
        await environment.close()
        return turns

    turns = asyncio.run(episode())
    assert [turn.reward for turn in turns] == [1.0, 0.0, 1.0]
    assert [turn.done for turn in turns] == [False, False, True]


@pytest.mark.parametrize(
    ("reference", "parameters", "message"),
    [
        ("my_environment:Silent", {}, "my_environment:Silent lacks step, close; it must have reset, step, close"),
        ("my_environment:Countdwn", {}, "has no class 'Countdwn'; did you mean 'Countdown'"),
        ("my_environment:Countdown", {"begin": 2}, "cannot be called: missing a required argument: 'start'"),
        ("my_enviroment:Countdown", {}, "no module 'my_enviroment' in .* nearest there: my_environment.py"),
    ],
)
def test_what_is_no_environment_is_refused(folder: Path, reference: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_environment(reference, folder, parameters)


def test_an_environment_is_played_by_a_worker(folder: Path) -> None:
    worker = environment_worker([environment_config("count", "my_environment:Countdown", parameters={"start": 2})], folder)
    try:
        turns = Player(worker).play("e1", ["3", "nothing", "1"], seed=1, environment="count")
    finally:
        worker.close()
    assert [turn.observation for turn in turns] == ["3 left", "2 left", "1 left", "0 left"]
    assert [turn.reward for turn in turns] == [0.0, 1.0, 0.0, 1.0]
    assert turns[-1].summary == {"left": 1.0}
