"""What a job names and is not there: found before any process starts, said with the remedy, exit code 2."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rljob_runtime.entry.local_run import run_job
from rljob_runtime.exit_codes import ExitCode
from tests.integration.jobs import job
from tests.support.golden import Golden

GOLDEN = Path(__file__).parents[3] / "golden" / "preflight"
REWARD = [{"name": "mine", "type": "Function", "function": "my_rewards:scor"}]


def jsonl(path: str) -> dict[str, Any]:
    return {"train": [{"name": "mine", "type": "JSONL", "jsonl": {"path": path}}]}


def task(name: str) -> dict[str, Any]:
    return {"train": [{"name": "mine", "type": "ReasoningGym", "reasoningGym": {"task": name}}]}


CASES: dict[str, dict[str, Any]] = {
    "missing_model": {"model": {"path": "models/none", "dtype": "float32"}},
    "folder_without_model": {"model": {"path": ".", "dtype": "float32"}},
    "missing_data": {"data": jsonl("none.jsonl")},
    "empty_data": {"data": jsonl("empty.jsonl")},
    "two_sources": {"data": {"train": [*jsonl("none.jsonl")["train"], {**jsonl("empty.jsonl")["train"][0], "name": "other"}]}},
    "misspelled_task": {"data": task("basic_arithmetik")},
    "reward_function_not_found": {"rewards": REWARD},
    "reward_module_not_found": {"rewards": [REWARD[0] | {"function": "no_such_rewards:score"}]},
    "other_ray": {"rayVersion": "2.53.0"},
    "misspelled_key": {"trainng": {"steps": 3}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "my_rewards.py").write_text("def score(prompt, response, answer, metadata):\n    return 1.0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CASES)
def test_the_message_says_what_is_missing_and_what_to_do(name: str, folder: Path, golden: Golden, capsys: Callable[..., Any]) -> None:
    manifest = job(Path("model"), steps=3)
    manifest["spec"]["rewards"] = [{"name": "answer", "type": "ExactMatch"}]
    manifest["spec"] |= CASES[name]
    code = run_job(yaml.safe_dump(manifest), folder / "job.yaml", folder / "run", overwrite=False, resume=False)
    said = capsys.readouterr().err.replace(str(folder), "FOLDER")
    assert code == ExitCode.INVALID
    assert golden.differences(GOLDEN / f"{name}.txt", said) == ""
    assert not (folder / "run").exists()
