"""Python blocks of the pages do what their page says. The others name what they need that is not here, or the test that runs them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml

from rljob_runtime.data import ParquetSource
from rljob_runtime.data.config import NO_CHAT_TEMPLATE
from rljob_runtime.data.parquet import read_rows
from rljob_runtime.losses.tokens import LossTokens
from tests.layout.tree import ROOT
from tests.support.snippets import Snippet, all_snippets

Names = dict[str, Any]

ENDPOINT = "needs the endpoint of an episode; tests/integration/test_harness_run.py runs such programs"
ELSEWHERE = {
    ("docs/agents.md", "openai.OpenAI()"): ENDPOINT,
    ("docs/how-to/harness.md", "openai.OpenAI()"): ENDPOINT,
    ("docs/how-to/checkpoints.md", "def load("): "needs a trained model",
    ("docs/placement.md", "FlexiblePlacementStrategy("): "tests/unit/docs/test_placement_page.py runs it",
    ("docs/python-api.md", "rljob.Callback"): "needs a whole run; tests/integration/test_library_run.py runs it",
    ("docs/python-api.md", "class Policy("): "tests/unit/library/test_python_api_page.py runs it",
    ("docs/python-api.md", "class Model("): "tests/unit/library/test_python_api_page.py runs it",
    ("docs/time-division.md", "DeviceArbiter("): "tests/unit/docs/test_time_division_page.py runs it",
}
"""Page and a text that only this block of it has -> why it is not run here."""


def reward(names: Names) -> Iterator[bool]:
    right, wrong = (names["score"]("What is 6 * 7?", response, "42", {}) for response in ("42", "I do not know."))
    yield isinstance(right, float)
    yield right > wrong


def one_reasoning_block(names: Names) -> Iterator[bool]:
    expected = {"<think>6 * 7</think>42": 1.0, "42": 0.0, "<think>42": 0.0, "<think><think></think>42": 0.0}
    for response, score in expected.items():
        yield names["score"]("6 * 7?", response, "42", {}) == score


def environment(names: Names) -> Iterator[bool]:
    """A binary search wins."""
    game = names["Guess"](highest=20)
    yield "from 1 to 20" in game.reset(seed=3)
    yield game.step("ten").reward < 0
    low, high = 1, 20
    for _ in range(5):
        turn = game.step(f"Is it {(low + high) // 2}?")
        if turn.done:
            break
        low, high = ((low + high) // 2 + 1, high) if turn.observation == "Higher." else (low, (low + high) // 2 - 1)
    yield (turn.done, turn.reward, turn.observation) == (True, 1.0, "Yes.")
    yield game.reset(seed=3) == game.reset(seed=3)
    game.close()


def algorithm(names: Names) -> Iterator[bool]:
    """Loss and estimate have the shapes that their comments name, and the loss has a gradient."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    tokens = LossTokens(
        logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=torch.tensor([1.0, 1.0, -1.0]), sequence_lengths=[2, 1]
    )
    losses = names["loss"](tokens, beta=0.1)
    yield losses.shape == (3,)
    losses.sum().backward()
    yield logprobs.grad is not None
    yield logprobs.grad.tolist() == [-1.0, -1.0, 1.0]

    class Step:
        rewards = numpy.array([1.0, 0.0])

    yield names["estimate"](Step).tolist() == [0.5, -0.5]


HERE: dict[tuple[str, str], Callable[[Names], Iterator[bool]]] = {
    ("README.md", "def score("): reward,
    ("docs/tutorial/index.md", "def score("): reward,
    ("docs/migrate/trl.md", "def score("): one_reasoning_block,
    ("docs/migrate/verl.md", "def score("): reward,
    ("docs/how-to/environment.md", "class Guess"): environment,
    ("docs/algorithms.md", "def loss("): algorithm,
}
"""Page and a text that only this block of it has -> what is tried with the names that it defines."""
WITH_INPUT = {("docs/time-division.md", "log_memory_usage(")}
"""Programs that need input; each has a test of its own below."""


def block(page: str, mark: str) -> Snippet:
    (found,) = [one for one in all_snippets("python") if one.page == ROOT / page and mark in one.text]
    return found


def run(snippet: Snippet, folder: Path, **names: Any) -> Names:
    """The names that the block defines, imported as a module, as jobs import such files."""
    file = folder / "block_of_page.py"
    file.write_text(snippet.text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    vars(module).update(names)
    spec.loader.exec_module(module)
    return vars(module)


def test_every_block_runs_or_has_a_reason() -> None:
    known = [str(block(page, mark)) for page, mark in [*ELSEWHERE, *HERE, *WITH_INPUT]]
    assert sorted(known) == sorted(map(str, all_snippets("python")))


@pytest.mark.parametrize("reason", sorted(set(ELSEWHERE.values())))
def test_the_tests_that_reasons_name_exist(reason: str) -> None:
    assert [word for word in reason.split() if word.startswith("tests/") and not (ROOT / word).exists()] == []


@pytest.mark.parametrize(("page", "mark"), list(HERE))
def test_what_a_block_defines_works(page: str, mark: str, tmp_path: Path) -> None:
    held = list(HERE[page, mark](run(block(page, mark), tmp_path)))
    assert held
    assert all(held), f"what does not hold: {[number for number, is_true in enumerate(held, 1) if not is_true]} of {len(held)}"


def test_memory_is_logged_as_the_page_says(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.INFO):
        run(block("docs/time-division.md", "log_memory_usage("), tmp_path, logger=logging.getLogger("page"))
    (record,) = caplog.records
    assert record.getMessage().startswith("after loading: ")


def test_verls_data_are_read_as_the_page_says(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "6 * 7?"}], "reward_model": {"style": "rule", "ground_truth": "42"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "train.parquet")
    (after,) = [one for one in all_snippets("yaml") if one.page == ROOT / "docs/migrate/verl.md" and one.title == "job.yaml"]
    job = yaml.safe_load(after.text)
    fields = job["spec"]["data"]["train"][0]["parquet"]
    read = ParquetSource(
        name="a",
        path=tmp_path / "train.parquet",
        prompt_field=fields["promptField"],
        answer_field=fields["answerField"],
        no_messages=None if job["spec"]["data"]["prompt"]["chatTemplate"] else NO_CHAT_TEMPLATE,
    )
    assert [(entry.question, entry.answer) for entry in read_rows(read)] == [("6 * 7?", "42")]
