"""Runs that overlap generation and training: real vLLM engines that are cancelled, validated beside, killed; every option at once."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import RULE_METRICS, VALIDATION_METRICS, Running, job


def held_out(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Validation data of the training's kind."""
    return [source | {"name": "held-out"} for source in manifest["spec"]["data"]["train"]]


def placed(*roles: tuple[str, str, str]) -> list[dict[str, Any]]:
    """Components on devices of their own, and a reward worker."""
    components = [{"name": name, "role": role, "placement": {"ranks": ranks}, "threadsPerWorker": 1} for name, role, ranks in roles]
    return [*components, {"name": "reward", "role": "Reward", "placement": {"workers": 1}}]


@pytest.mark.slow
def test_with_every_option_of_the_overlap_each_step_is_trained_within_the_bound(model: Path, tmp_path: Path) -> None:
    manifest = job(
        model,
        steps=6,
        overlap={"asyncGenerationRatio": 1, "updateMode": "Interrupt"},
        validation={"everySteps": 3, "maxPrompts": 5, "samplesPerPrompt": 1},
    )
    spec = manifest["spec"]
    spec["data"]["validation"] = held_out(manifest)
    spec["rollout"] |= {"redundantSamples": 2, "extraPrompts": 3, "groupFilter": {"minStd": 0.0}, "groupRouting": "Together"}
    spec["nodeGroups"][0]["devicesPerNode"] = 3
    spec["components"] = placed(("actor_train", "Trainer", "0"), ("actor_infer", "Rollout", "1-2"))
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert max(m["staleness/max"] for m in metrics) == 1
    assert all(m["rollout/sequences"] == 16 for m in metrics)
    assert all(m["reward/uniform_groups_fraction"] == 0 for m in metrics), "a group of equal scores was trained"
    assert sum(m["rollout/requests_cancelled"] for m in metrics) > 0
    assert {m["validation/version"]: m["validation/prompts"] for m in metrics if "validation/version" in m} == {0: 5, 3: 5, 6: 5}
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics)
    assert {key for m in metrics for key in m} >= VALIDATION_METRICS


@pytest.mark.slow
def test_a_killed_engine_costs_no_response(model: Path, tmp_path: Path) -> None:
    manifest = job(model, steps=12, overlap={"asyncGenerationRatio": 1, "updateMode": "Interrupt"})
    manifest["spec"]["nodeGroups"][0]["devicesPerNode"] = 3
    manifest["spec"]["components"] = placed(("actor_train", "Trainer", "0"), ("actor_infer", "Rollout", "1-2"))
    manifest["spec"]["rewards"][0]["function"] = "length_reward:slow_score"
    run = Running(tmp_path, manifest)
    run.until("the second step", lambda: len(run.metrics()) >= 2)
    os.kill(run.worker_pid("actor_infer-1"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == list(range(1, 13))
    assert sum(m["rollout/engines_lost"] for m in metrics) == 1
    assert sum(m["rollout/groups_dropped"] for m in metrics) == 0
    assert all(m["rollout/sequences"] == 16 for m in metrics)
    assert "actor_infer-1 is gone" in run.output


@pytest.mark.slow
def test_a_critic_and_every_correction_train_and_resume(model: Path, tmp_path: Path) -> None:
    manifest = job(
        model,
        steps=4,
        overlap={"asyncGenerationRatio": 1, "updateMode": "InFlight"},
        algorithm={
            "advantage": {"estimator": "GAE", "gamma": 1.0, "lambda": 0.95, "whiten": True, "clip": 5.0},
            "reward": {"scale": "Running", "clip": 4.0, "overlong": {"bufferTokens": 2, "penalty": 0.1}},
            "policyLoss": {"variant": "PPO", "dualClip": 3.0, "aggregation": "SeqMeanTokenSumNorm"},
            "offPolicy": {
                "proximal": "Recompute",
                "weight": {"level": "Token", "high": 2.0},
                "masks": [{"level": "Geometric", "low": 0.5, "high": 2.0}],
            },
            "distillation": {"coefficient": 0.1, "placement": "Loss"},
            "kl": {"coefficient": 0.01, "placement": "Reward", "estimator": "K1", "target": 0.1, "horizon": 100},
            "entropyCoefficient": 0.001,
            "sampleWeights": {"difficulty": True},
            "filters": {"maxFailedTokens": 8},
            "critic": {"learningRate": 1e-3, "valueClip": 0.5, "warmupSteps": 1},
        },
    )
    spec = manifest["spec"]
    spec["nodeGroups"][0]["devicesPerNode"] = 8
    spec["components"] = placed(
        ("actor_train", "Trainer", "0"), ("actor_infer", "Rollout", "1"), ("ref", "Reference", "2-3"), ("critic", "Critic", "4-5")
    )
    teacher = str(shutil.copytree(model, tmp_path / "teacher"))
    spec["components"].append({"name": "teacher", "role": "Teacher", "placement": {"ranks": "6-7"}, "model": {"path": teacher}})
    critic = next(component for component in spec["components"] if component["role"] == "Critic")
    for component in spec["components"]:
        if component["role"] in ("Reference", "Critic", "Teacher"):
            component["tensorParallelSize" if component["role"] == "Reference" else "contextParallelSize"] = 2
    spec["training"] |= {"miniBatches": 2}
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert "train/total_loss" not in metrics[0], "the first step trains the critic alone"
    assert all("train/total_loss" in m for m in metrics[1:])
    assert all(m["critic/grad_norm"] > 0 for m in metrics)
    assert all(m["time/score_s"] > 0 for m in metrics)
    assert {key for m in metrics for key in m} >= RULE_METRICS
    spec["training"]["steps"] = 5
    critic["tensorParallelSize"] = critic.pop("contextParallelSize")  # its checkpoint is of any layout
    resumed = Running(tmp_path, manifest, "--resume")
    assert resumed.wait() == 0, resumed.output
    assert [m["step"] for m in resumed.metrics()] == [1, 2, 3, 4, 5]
