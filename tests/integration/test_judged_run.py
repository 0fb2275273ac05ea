"""A job whose score is what a judge says, over HTTP, with two reward workers and a key that only they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from rljob_runtime.data.tokenizer import load_tokenizer
from tests.integration.jobs import Running, job
from tests.support.judge_endpoint import JudgeEndpoint, Reply

PLACES = [
    {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}, "threadsPerWorker": 1},
    {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "1"}, "threadsPerWorker": 1},
    {"name": "reward", "role": "Reward", "placement": {"workers": 2}},
]


def say(messages: list[dict[str, str]]) -> Reply:
    """Points for digits, with a reason before the verdict."""
    question, response = messages[-1]["content"].split("\n---\n")
    assert "+" in question
    digits = sum(character.isdigit() for character in response)
    return Reply(text=f"There are {digits} digits.\n" + json.dumps({"verdict": {"score": digits / 8}}))


@pytest.mark.slow
def test_a_judge_scores_a_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_JUDGE", "sk-run")
    with JudgeEndpoint(say, api_key="sk-run") as endpoint:
        judge = {
            "endpoint": {"url": endpoint.url, "model": "judge", "apiKeyEnv": "MY_JUDGE"},
            "system": "You count digits.",
            "template": "{question}\n---\n{response}",
            "parser": {"field": "verdict.score", "minimum": 0, "maximum": 1},
            "limits": {"inFlight": 8},
        }
        groups = [
            {
                "name": "local",
                "devicesPerNode": 2,
                "deviceResource": "cpu",
                "env": [{"name": "MY_JUDGE", "valueFrom": {"secretKeyRef": {"name": "judge", "key": "key"}}}],
            }
        ]
        rewards = [{"name": "grader", "type": "LLMJudge", "judge": judge}]
        run = Running(tmp_path, job(model, steps=2, rewards=rewards, components=PLACES, nodeGroups=groups))
        assert run.wait() == 0, run.output
        assert {request["messages"][0]["content"] for request in endpoint.requests} == {"You count digits."}
        metrics = run.metrics()
        assert sum(m["judge/calls/grader"] for m in metrics) == len(endpoint.requests) >= 32
    assert all(m["judge/failures/grader"] == 0 and m["judge/questions/grader"] >= 16 for m in metrics)
    assert all(m["judge/prompt_tokens/grader"] > 0 and m["judge/completion_tokens/grader"] > 0 for m in metrics)
    assert all(m["reward/mean"] == m["reward/part/grader"] for m in metrics)
    rows = run.rows("trajectories/step-000002.jsonl")
    assert all(row["judgements"]["grader"].startswith("There are ") for row in rows)
    assert "There are " in (run.run_dir / "report.html").read_text()
    written = [path.read_text(errors="replace") for path in run.run_dir.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert not any("sk-run" in text for text in written)


CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def classifier(policy: Path, folder: Path) -> tuple[Path, Callable[[str], float]]:
    """A reward model with the policy's tokenizer in ``folder``, and what it scores a text without any server."""
    tokenizer = load_tokenizer(str(policy), trust_remote_code=False)
    torch.manual_seed(3)
    config = Qwen2Config.from_pretrained(policy, num_labels=1)
    model = Qwen2ForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    def score(text: str) -> float:
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0, 0])

    return folder, score


RANKS = {"apart": "0123", "beside": "0100"}
"""Devices of trainer, engine, judge and reward model."""


def judging_job(model: Path, folder: Path, places: str) -> tuple[dict[str, Any], Callable[[str], float]]:
    """A job whose responses two models score, on devices of their own or of others, and what one of them scores."""
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    scorer, expected = classifier(model, folder / "scorer")
    engine = {"extraArgs": {"chat_template": str(template), "max_model_len": 128}, "prefixCaching": False}
    train, infer, grader, score = RANKS[places]
    components = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": train}, "threadsPerWorker": 1},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": infer}, "threadsPerWorker": 1},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        {"name": "grader_model", "role": "Judge", "placement": {"ranks": grader}, "model": {"path": str(model)}, "engine": engine},
        {
            "name": "scorer_model",
            "role": "Judge",
            "placement": {"ranks": score},
            "model": {"path": str(scorer)},
            "engine": {"extraArgs": {"max_model_len": 128}, "prefixCaching": False},
        },
    ]
    judge = {
        "component": "grader_model",
        "template": "{question}{response}",
        "sampling": {"temperature": 0.0, "max_tokens": 4, "min_tokens": 1},  # its first token may be the end
        "parser": {"pattern": r"\d", "otherwise": 0.5},
    }
    rewards = [
        {"name": "grader", "type": "LLMJudge", "judge": judge},
        {"name": "scorer", "type": "RewardModel", "rewardModel": {"component": "scorer_model", "template": "{question}{response}"}},
    ]
    groups = [{"name": "local", "devicesPerNode": len(set(RANKS[places])), "deviceResource": "cpu"}]
    sections: dict[str, Any] = {} if places == "apart" else {"offload": {"residency": "Switching"}}
    made = job(model, steps=2, rewards=rewards, components=components, nodeGroups=groups, **sections)
    if places == "beside":
        made["spec"]["data"]["validation"] = made["spec"]["data"]["train"]
        made["spec"]["validation"] = {"everySteps": 1, "maxPrompts": 4}
    return made, expected


@pytest.mark.slow
@pytest.mark.parametrize("places", ["apart", "beside"])
def test_models_on_devices_of_the_job_judge_and_end_with_it(places: str, model: Path, tmp_path: Path) -> None:
    """Real vLLM behind its own server, twice: the tiny model judges by answering the question again, another one scores by its class.

    Beside the trainer they take turns with it and score the same. One with the trainer and one with the engine: e2e/test_scores.py.
    """
    manifest, expected = judging_job(model, tmp_path, places)
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    for name in ("grader", "scorer"):
        assert all(m[f"judge/failures/{name}"] + m["reward/errors"] == 0 and m[f"judge/calls/{name}"] >= 16 for m in metrics)
        assert all(m[f"judge/prompt_tokens/{name}"] > 0 for m in metrics)
    rows = [row for step in (1, 2) for row in run.rows(f"trajectories/step-{step:06}.jsonl")]
    assert len(rows) == 4
    for row in rows:
        assert row["parts"]["scorer"] == pytest.approx(expected(row["prompt"] + row["response"]), abs=2e-3)
    assert len({row["parts"]["scorer"] for row in rows}) > 1, "a score that does not depend on the response shows nothing"
    assert run.left_behind() == []
    if places != "apart":
        moved = [row for row in run.rows("switches.jsonl") if row.get("worker") in ("grader_model-0", "scorer_model-0")]
        loads = [row["after"]["allocated"] for row in moved if row.get("direction") == "load"]
        assert len(loads) >= 2 * len(metrics)
        assert min(loads) > 0
        assert all(m["offload/bytes"] > 0 for m in metrics)
