"""On-policy distillation with everything real: the example, shortened, whose policy has no rewards and shares a device with its teacher."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.integration.jobs import Running, shortened

pytestmark = pytest.mark.slow


def other_weights(model: Path, folder: Path) -> Path:
    """A model of the same shape and vocabulary that knows nothing of the first one."""
    shutil.copytree(model, folder)
    torch.manual_seed(7)
    Qwen2ForCausalLM(Qwen2Config.from_pretrained(model)).save_pretrained(folder)
    return folder


def test_a_policy_without_rewards_comes_closer_to_its_teachers(model: Path, tmp_path: Path) -> None:
    fixed = {"steps": 12, "learningRate": 3e-3, "warmupSteps": 0}
    manifest = shortened("distillation", model, steps=12, rewards=[], training=fixed, offload={"residency": "Switching"})
    (teacher,) = (component for component in manifest["spec"]["components"] if component["role"] == "Teacher")
    teacher["model"]["path"] = str(other_weights(model, tmp_path / "teacher"))
    second = {"name": "second", "model": {"path": str(other_weights(model, tmp_path / "second"))}, "teaches": {"sources": ["more"]}}
    manifest["spec"]["components"].append(teacher | second)
    data = manifest["spec"]["data"]["train"]
    data.append(data[0] | {"name": "more"})
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    distances = [m["distillation/kl"] for m in metrics]
    assert len(distances) == 12
    assert fmean(distances[-3:]) < 0.8 * fmean(distances[:3]), distances
    assert all(m["reward/mean"] == 0 for m in metrics)
    assert all(m["offload/bytes"] > 0 for m in metrics), "the teachers' weights and the trainer's state take turns on device 0"
    assert run.left_behind() == []
