"""On-policy distillation with everything real: a policy without rewards becomes like its teacher, on devices that the two share."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.integration.jobs import Running, job


def other_weights(model: Path, folder: Path) -> Path:
    """A model of the same shape and vocabulary that knows nothing of the first one."""
    shutil.copytree(model, folder)
    torch.manual_seed(7)
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(model)).save_pretrained(folder)
    return folder


def test_a_policy_without_rewards_comes_closer_to_its_teacher(model: Path, tmp_path: Path) -> None:
    places = [
        {"name": "student_train", "role": "Trainer", "placement": {"ranks": "0"}, "threadsPerWorker": 1},
        {"name": "student_infer", "role": "Rollout", "placement": {"ranks": "1"}, "threadsPerWorker": 1},
        {
            "name": "teacher",
            "role": "Teacher",
            "placement": {"ranks": "0"},
            "threadsPerWorker": 1,
            "model": {"path": str(other_weights(model, tmp_path / "teacher"))},
        },
    ]
    manifest = job(
        model,
        steps=12,
        components=places,
        rewards=[],
        rollout={"promptsPerStep": 16, "samplesPerPrompt": 1, "maxPromptTokens": 64, "maxResponseTokens": 8},
        training={"steps": 12, "learningRate": 3e-3},
        offload={"residency": "Switching"},
    )
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    distances = [m["distillation/kl"] for m in metrics]
    assert len(distances) == 12
    assert fmean(distances[-3:]) < 0.8 * fmean(distances[:3]), distances
    assert all(m["reward/mean"] == 0 for m in metrics)
    assert all(m["offload/bytes"] > 0 for m in metrics), "the teacher's weights and the trainer's state take turns on device 0"
    assert run.left_behind() == []
