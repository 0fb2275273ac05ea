"""A job whose score is what a judge says, over HTTP, with two reward workers and a key that only they hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
                "env": [{"name": "MY_JUDGE", "secretKeyRef": {"name": "judge", "key": "key"}}],
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


def test_a_model_on_devices_of_the_job_judges_and_ends_with_it(model: Path, tmp_path: Path) -> None:
    """Real vLLM behind its own server; the tiny model judges by answering the question again."""
    template = tmp_path / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    engine = {"extraArgs": {"chat_template": str(template), "max_model_len": 128}, "prefixCaching": False}
    places = [
        *PLACES[:2],
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        {"name": "grader_model", "role": "Judge", "placement": {"ranks": "2"}, "model": {"path": str(model)}, "engine": engine},
    ]
    judge = {
        "component": "grader_model",
        "template": "{question}{response}",
        "sampling": {"temperature": 0.0, "max_tokens": 4, "min_tokens": 1},  # its first token may be the end
        "parser": {"pattern": r"\d", "otherwise": 0.5},
    }
    rewards = [{"name": "grader", "type": "LLMJudge", "judge": judge}]
    groups = [{"name": "local", "devicesPerNode": 3, "deviceResource": "cpu"}]
    run = Running(tmp_path, job(model, steps=2, rewards=rewards, components=places, nodeGroups=groups))
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert all(m["judge/failures/grader"] + m["reward/errors"] == 0 and m["judge/calls/grader"] >= 16 for m in metrics)
    assert all(m["judge/prompt_tokens/grader"] > 0 for m in metrics)
    assert run.left_behind() == []
