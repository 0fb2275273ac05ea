"""Reward functions given to ``rljob.run`` become rewards of the job, and travel to processes that cannot import them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_api.vocabulary import RewardType
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.library import rewards
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.functions import load

SCALE = 4


def half_length(prompt: str, response: str, answer: str, metadata: object) -> float:
    return len(response) / SCALE


def test_a_function_becomes_a_reward_and_an_entry_of_its_name_keeps_the_rest(tmp_path: Path) -> None:
    manifest = {"spec": {"rewards": [{"name": "brevity", "weight": 0.5, "readPaths": ["/data"]}, {"name": "answer", "type": "Task"}]}}
    functions = rewards.named({"brevity": half_length, "other": half_length})
    made = rewards.with_functions(manifest, functions, tmp_path)["spec"]["rewards"]
    assert [r["name"] for r in made] == ["brevity", "answer", "other"]
    assert made[0]["weight"] == 0.5
    assert made[0]["readPaths"] == ["/data", str(tmp_path)]
    assert made[1] == {"name": "answer", "type": "Task"}
    assert made[2]["parameters"] == {"file": str(tmp_path / "other.pkl"), "arguments": {}}
    assert manifest["spec"]["rewards"][0] == {"name": "brevity", "weight": 0.5, "readPaths": ["/data"]}, "the caller's stays as it was"
    assert rewards.with_functions(manifest, {}, tmp_path) == manifest


def test_names_come_from_the_functions() -> None:
    assert list(rewards.named(half_length)) == ["half-length"]
    assert list(rewards.named([half_length])) == ["half-length"]
    assert rewards.named(None) == {}
    with pytest.raises(RewardSetupError, match=r"2 functions are called 'half-length'; give a dict"):
        rewards.named([half_length, half_length])
    with pytest.raises(RewardSetupError, match="without a name of its own"):
        rewards.named(lambda prompt, response, answer, metadata: 1.0)
    with pytest.raises(RewardSetupError, match=r"rewards\['x'\]\(response\) cannot be called.*prompt, response, answer, metadata"):
        rewards.with_functions({}, {"x": lambda response: 1.0}, Path())
    with pytest.raises(RewardSetupError, match=r"rewards\['x'\] is a int; give a function"):
        rewards.named({"x": 3})  # type: ignore[dict-item]


def test_a_function_runs_in_a_process_that_cannot_import_its_module(tmp_path: Path) -> None:
    functions = rewards.named({"length": half_length})
    rewards.write(functions, tmp_path)
    (entry,) = rewards.with_functions({}, functions, tmp_path)["spec"]["rewards"]
    code = f"""
from rljob_api.vocabulary import RewardType
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.functions import load
reward = load(RewardConfig(name="length", type=RewardType.FUNCTION, function={entry["function"]!r}, params={entry["parameters"]!r}), None)
print(reward("p", "eight ch", "a", {{}}))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "2.0\n"


def shortness(prompt: str, response: str, answer: str, metadata: object, *, limit: int) -> float:
    return float(len(response) <= limit)


def test_a_function_gets_the_parameters_of_its_entry(tmp_path: Path) -> None:
    functions = rewards.named({"short": shortness})
    rewards.write(functions, tmp_path)
    manifest = {"spec": {"rewards": [{"name": "short", "parameters": {"limit": 3}}]}}
    (entry,) = rewards.with_functions(manifest, functions, tmp_path)["spec"]["rewards"]
    score = load(RewardConfig(name="short", type=RewardType.FUNCTION, function=entry["function"], params=entry["parameters"]), None)
    assert [score("p", text, "a", {}) for text in ("abc", "abcd")] == [1.0, 0.0]
    with pytest.raises(RewardSetupError, match="missing a required argument: 'limit'"):
        rewards.with_functions({}, functions, tmp_path)


def test_a_function_that_cannot_travel_is_refused_with_its_name(tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:

        def bad(prompt: str, response: str, answer: str, metadata: object) -> float:
            return float(file.write(response))

        with pytest.raises(RewardSetupError, match=r"rewards\['bad'\] cannot be sent to the scoring processes"):
            rewards.write({"bad": bad}, tmp_path / "functions")


def test_what_a_function_needs_is_loaded_before_its_time_runs(tmp_path: Path) -> None:
    config = RewardConfig(
        name="x", type=RewardType.FUNCTION, function="rljob_runtime.library.pickled:score", params={"file": str(tmp_path / "none")}
    )
    with pytest.raises(FileNotFoundError):
        load(config, None)
