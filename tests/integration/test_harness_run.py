"""An agent program that knows OpenAI's client alone, trained from the command line: embedded Ray, real vLLM."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import EPISODE_METRICS, Running, job

pytestmark = pytest.mark.slow

AGENT = '''
"""Wants digits back, over two turns; of a task with an odd number it asks for something else besides."""

import json
import os

import openai

with open(os.environ["RLJOB_TASK"]) as file:
    number = json.load(file)["task"]["number"]
client = openai.OpenAI()
model = client.models.list().data[0].id
metrics = {"tokens": 0, "logprob": 0.0, "prefix_kept": 1.0}
said = ""


def ask(messages, before=()):
    """A response, and all token ids up to its end."""
    global said
    response = client.chat.completions.create(model=model, messages=messages, logprobs=True, extra_body={"return_token_ids": True})
    (choice,) = response.choices
    metrics["tokens"] += len(choice.token_ids)
    metrics["logprob"] += sum(entry.logprob for entry in choice.logprobs.content)
    metrics["prefix_kept"] *= response.prompt_token_ids[: len(before)] == list(before)
    said += choice.message.content
    return choice.message, response.prompt_token_ids + choice.token_ids


talk = [{"role": "user", "content": f"{number} + 1 = "}]
answer, ids = ask(talk)
answer, ids = ask([*talk, answer, {"role": "user", "content": " and once more = "}], ids)
if number % 2:
    ask([{"role": "user", "content": "something else"}])
with open(os.environ["RLJOB_REWARD_FILE"], "w") as file:
    json.dump({"reward": sum(letter.isdigit() for letter in said) / 24, "metrics": metrics}, file)
'''
STEPS = 3


def agent_job(model: Path, folder: Path) -> dict[str, Any]:
    environment = {
        "name": "agent",
        "type": "Harness",
        "maxTurns": 3,
        "maxProcesses": 4,
        "stepTimeoutSeconds": 300.0,
        "harness": {"command": ["python", "agent.py"], "tasks": str(folder / "tasks.jsonl")},
    }
    manifest = job(
        model,
        steps=STEPS,
        pipeline="Agentic",
        environments=[environment],
        rollout={"promptsPerStep": 2, "samplesPerPrompt": 2, "maxPromptTokens": 120, "maxResponseTokens": 8},
    )
    spec = manifest["spec"]
    del spec["data"], spec["rewards"]
    spec["components"][2] = {"name": "agents", "role": "Environment", "placement": {"workers": 1}}
    return manifest


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("harness")
    (folder / "agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"number": number}) + "\n" for number in range(6)))
    running = Running(folder, agent_job(model, folder))
    assert running.wait() == 0, running.output
    return running


def test_what_is_trained_is_what_the_program_was_given(run: Running) -> None:
    """Tokens and log-probs that its client saw are those of the step, and, on-policy, the trainer's own for the sequences it trained."""
    rows = run.metrics()
    assert len(rows) == STEPS
    for row in rows:
        assert row.keys() >= {name for name in EPISODE_METRICS if not name.startswith("validation/")}
        assert row["episode/info/agent/prefix_kept"] == 1.0
        episodes = 4
        assert row["rollout/tokens"] == pytest.approx(row["episode/info/agent/tokens"] * episodes)
        assert row["rollout/logprob_mean"] * row["rollout/tokens"] == pytest.approx(row["episode/info/agent/logprob"] * episodes, rel=1e-4)
        assert row["mismatch/max_abs_logprob_diff"] < 1e-3
        assert row["train/grad_norm"] > 0
        assert row["staleness/max"] == 0


def test_what_continues_nothing_is_a_further_sequence_of_its_episode(run: Running) -> None:
    rows = run.metrics()
    for row in rows:
        assert row["rollout/sequences"] == 4
        assert row["episode/info/agent/calls"] == row["episode/turns_mean"] == row["episode/info/agent/samples"] + 1
    assert max(row["episode/info/agent/samples"] for row in rows) > 1


def test_programs_are_confined_and_nothing_is_left_behind(run: Running) -> None:
    assert "its processes are sandboxed by seccomp" in run.output + str(run.rows("events.jsonl"))
    assert run.left_behind() == []
