"""Several components of one role in a real job: engines of different sizes share its requests, two pools of workers its rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.counting_engine import requests_by_version, versions
from tests.integration.jobs import Running, job

STEPS = 2
PROMPTS, SAMPLES = 8, 4
SLOTS = {"small": 8, "large": 24}
"""Requests that an engine of a component computes at the same time; together a step's."""
POOLS = {"checks": 1, "scorers": 2}
"""Workers of each Reward component."""
REWARD = '''
"""A reward that leaves a line in its worker's log."""


def score(prompt, response, answer, metadata):
    print("scored one", flush=True)
    return sum(c.isdigit() for c in response) / 8
'''


def several(model: Path) -> dict[str, Any]:
    """Two Rollout components, two Reward components, two data sources, and rewards of two kinds, one of which scores one source alone."""
    components = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}, "threadsPerWorker": 1},
        *(
            {
                "name": name,
                "role": "Rollout",
                "placement": {"ranks": str(device)},
                "threadsPerWorker": 1,
                "engine": {"maxRunningRequests": slots, "prefixCaching": False},
            }
            for device, (name, slots) in enumerate(SLOTS.items(), start=1)
        ),
        *({"name": name, "role": "Reward", "placement": {"workers": workers}} for name, workers in POOLS.items()),
    ]
    rewards = [
        {"name": "digits", "type": "Function", "function": "counted_reward:score"},
        {"name": "task", "type": "Task", "sources": ["sums"]},
    ]
    rollout = {"promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES, "maxPromptTokens": 64, "maxResponseTokens": 8}
    manifest = job(model, steps=STEPS, components=components, rewards=rewards, rollout=rollout)
    manifest["spec"]["nodeGroups"][0]["devicesPerNode"] = 1 + len(SLOTS)
    sources = manifest["spec"]["data"]["train"]
    sources.append(sources[0] | {"name": "more"})
    return manifest


@pytest.mark.slow
def test_engines_and_reward_workers_of_several_components_share_a_job(model: Path, tmp_path: Path) -> None:
    (tmp_path / "counted_reward.py").write_text(REWARD)
    run = Running(tmp_path, several(model), adapter="tests.integration.counting_engine:ADAPTER")
    assert run.wait() == 0, run.output
    metrics, responses = run.metrics(), PROMPTS * SAMPLES
    assert [m["sync/version"] for m in metrics] == list(range(1, STEPS + 1))
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics), "an engine does not have the trainer's weights"
    assert all(m["rollout/sequences"] == responses for m in metrics)
    assert all(m["train/grad_norm"] > 0 for m in metrics)

    given: dict[str, dict[int, int]] = {}
    for name in SLOTS:
        log = run.log(f"{name}-0")
        assert versions(log)[-STEPS:] == list(range(1, STEPS + 1)), f"{name}: {log}"
        given[name] = requests_by_version(log)
    for version in range(STEPS):
        small, large = given["small"][version], given["large"][version]
        assert small + large == responses, given
        assert small == pytest.approx(responses * SLOTS["small"] / sum(SLOTS.values()), abs=SAMPLES), given  # one that ends frees a slot

    scored = {name: sum(run.log(f"{name}-{rank}").count("scored one") for rank in range(workers)) for name, workers in POOLS.items()}
    assert sum(scored.values()) == STEPS * responses
    assert min(scored.values()) > 0, scored
    assert all({"reward/part/digits", "reward/source/sums", "reward/source/more"} <= m.keys() for m in metrics)
    assert any("reward/part/task" in m for m in metrics)
    assert run.left_behind() == []
