"""The table of upstream examples, on checkouts made here: what is an example, of which kind, and who owns a refusal."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.upstream import corpus, report
from bench.upstream.outcome import Outcome, examine

JOB = "exp_name: a\npretrain: {model}\nadv_estimator: grpo\nnum_return_sequences_in_group: 8\nactor_train: {{device_mapping: '[0]'}}\n"
JUDGE = "rewards: {llm_judge: {worker_cls: x.LLMJudgeRewardWorker, judge_model_type: inference}}\n"
SGLANG = "actor_infer: {strategy_args: {strategy_name: sglang}}\n"
OWN = "rewards: {mine: {worker_cls: x.Mine}}\n"
FILES = {
    "examples/text/rlvr.yaml": JOB.format(model="Qwen/Qwen2.5-7B") + OWN,
    "examples/text/sglang.yaml": JOB.format(model="Qwen/Qwen2.5-7B") + OWN + SGLANG,
    "examples/text/judge.yaml": JOB.format(model="Qwen/Qwen2.5-7B") + JUDGE,
    "examples/moe/rlvr.yaml": JOB.format(model="Qwen/Qwen3-30B-A3B") + OWN,
    "examples/qwen2.5-vl-7B/rlvr.yaml": JOB.format(model="Qwen/Qwen2.5-VL-7B") + OWN,
    "examples/agents/sokoban.yaml": JOB.format(model="Qwen/Qwen2.5-7B") + "train_env_manager: {group_size: 8}\n",
    "examples/sft.yaml": "exp_name: a\nsft_train: {}\n",
    "examples/parts.yaml": "max_tokens_per_step: 64\n",
    "docs/not_an_example.yaml": "exp_name: a\n",
}


@pytest.fixture
def outcomes(tmp_path: Path) -> dict[str, Outcome]:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {example.name: examine(example, {}) for example in corpus.examples("roll", tmp_path)}


def test_kinds(outcomes: dict[str, Outcome]) -> None:
    assert {name: outcome.example.kind for name, outcome in outcomes.items()} == {
        "examples/text/rlvr.yaml": corpus.TEXT,
        "examples/text/judge.yaml": corpus.TEXT,
        "examples/text/sglang.yaml": corpus.TEXT,
        "examples/moe/rlvr.yaml": corpus.MIXTURE,
        "examples/qwen2.5-vl-7B/rlvr.yaml": corpus.VISION,
        "examples/agents/sokoban.yaml": corpus.AGENTIC,
        "examples/sft.yaml": corpus.NOT_RL,
        "examples/parts.yaml": corpus.NO_JOB,
    }


@pytest.mark.parametrize(
    ("model", "mixture"),
    [("Qwen/Qwen3-235B-A22B", True), ("qwen3-235BA22B-rlvr_megatron", True), ("Qwen/Qwen3-30B-A3B-Base", True), ("Qwen/Qwen2.5-7B", False)],
)
def test_a_mixture_is_known_by_its_name(model: str, mixture: bool) -> None:
    assert corpus.is_mixture(model) is mixture


def test_owners(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["examples/text/rlvr.yaml"].is_valid
    assert outcomes["examples/text/rlvr.yaml"].owners == ()
    assert outcomes["examples/text/judge.yaml"].is_valid
    assert (outcomes["examples/text/judge.yaml"].owners, outcomes["examples/text/judge.yaml"].judges) == ((), True)
    assert outcomes["examples/text/rlvr.yaml"].judges is False
    assert outcomes["examples/text/sglang.yaml"].is_valid
    assert outcomes["examples/moe/rlvr.yaml"].owners == ()
    assert outcomes["examples/agents/sokoban.yaml"].is_valid


def test_figures(outcomes: dict[str, Outcome]) -> None:
    figures = report.data(list(outcomes.values()), {"ROLL": "here"}, None)
    assert figures["headline"].startswith(
        "4 of 5 text jobs are valid and planned as they are, 1 once their judge's model is served,"
        " 0 wait for planned work or a missing file, 0 are open"
    )
    assert "| ROLL | RL with agents | 1 | 0 | 0 | 1 |" in report.markdown(figures)
    assert "a mixture of experts, on text or with agents: 1 of 1 of ROLL valid, 1 planned." in report.markdown(figures)


def test_a_file_that_is_no_job_and_was_taken_is_named(outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["examples/sft.yaml"]
    assert report.wrongly_accepted([outcome]) == []
    assert report.wrongly_accepted([Outcome(example=outcome.example)]) != []


def test_what_holds_no_examples_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="neither a folder with examples nor a bare repository"):
        corpus.checkout(tmp_path / "nothing", tmp_path / "scratch")
