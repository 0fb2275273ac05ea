"""What the spec says of prompts reaches the source that gives them, and what users should know of them is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.reading import manifest
from rljob_api.v1alpha1 import RLJobSpec
from rljob_runtime.errors import DataError
from rljob_runtime.job import assemble
from tests.integration.jobs import job
from tests.support.chat_tokenizers import chat_tokenizer


def spec(folder: Path, rows: list[dict[str, Any]], *, per_step: int = 2, max_tokens: int = 64, **prompt: Any) -> RLJobSpec:
    path = folder / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = {"name": "mine", "type": "JSONL", "jsonl": {"path": str(path), "promptField": "prompt", "answerField": "reward.truth"}}
    data = {"train": [source], "validation": [source], "prompt": prompt}
    changed = job(Path("m"), steps=1, data=data)
    changed["spec"]["rollout"] |= {"promptsPerStep": per_step, "maxPromptTokens": max_tokens}
    return manifest.to_job(manifest.Document(data=changed)).spec


def row(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "reward": {"truth": text.upper()}}


def test_conversations_with_settings_of_the_chat_template(tmp_path: Path) -> None:
    given = spec(tmp_path, [row("a"), row("b")], chatTemplate=True, templateParameters={"enable_thinking": False})
    prompts = assemble.training_source(given, chat_tokenizer("reasoning"), pytest.fail).next(2)
    assert {(p.question, p.answer) for p in prompts} == {("a", "A"), ("b", "B")}
    assert all(p.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n") for p in prompts)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({}, r"needs a chat template: set data\.prompt\.chatTemplate: true, or write text"),
        (
            {"chatTemplate": True, "template": "Solve: {question}"},
            r"has no place for data\.prompt\.template: remove the template, or write",
        ),
    ],
)
def test_conversations_need_the_chat_template_and_no_other(prompt: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"field 'prompt': a list of messages {said}"):
        assemble.training_source(spec(tmp_path, [row("a")], **prompt), chat_tokenizer("reasoning"), pytest.fail)


def test_fewer_prompts_than_a_step_takes_and_those_that_are_left_out_are_announced(tmp_path: Path) -> None:
    said: list[str] = []
    given = spec(tmp_path, [row("a"), row("b" * 500)], per_step=3, max_tokens=20, chatTemplate=True)
    assemble.training_source(given, chat_tokenizer("chatml"), said.append).next(2)
    assert said[0] == "spec.data.train has 2 prompts, spec.rollout.promptsPerStep is 3: prompts occur several times in a step"
    assert said[1:] != []
    said.clear()
    assert [p.question for p in assemble.validation_prompts(given, chat_tokenizer("chatml"), said.append)] == ["a"]
    assert "data source 'mine': 1 of 2 prompts are left out" in said[-1]


def test_what_is_said_of_prompts_is_shown_once_though_they_are_read_twice(tmp_path: Path) -> None:
    said: list[str] = []
    announce = assemble.shown_once(said.append)
    given = spec(tmp_path, [row("a")], per_step=3, chatTemplate=True)
    for _ in range(2):
        assemble.training_source(given, chat_tokenizer("chatml"), announce)
    assert len(said) == 1
