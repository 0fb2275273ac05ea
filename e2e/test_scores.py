"""Jobs whose models beside the policy come from a volume: a judge and a reward model that share devices, and a teacher."""

from __future__ import annotations

import base64
import io
import json
import tarfile
import tempfile
from pathlib import Path
from statistics import fmean

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from e2e.jobs import Manifest, example, quickstart
from e2e.kubectl import Kubectl
from e2e.volumes import Volume
from rljob_runtime.tiny import TinySize, make_tiny_model

SCORED, TAUGHT = "scored", "taught"
SCORED_STEPS, TAUGHT_STEPS = 3, 12
TRAINS_S = 600.0
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MODELS = "/storage/models"
"""Where pods see the folder that :func:`put_models` fills."""


def packed_models(folder: Path) -> str:
    """An untrained policy, a teacher and a reward model of its shape, and a chat template, as a tar in base64."""
    make_tiny_model(folder / "fresh", size=TinySize.FRESH)
    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(folder / "fresh")
    others = {
        "scorer": Qwen2ForSequenceClassification(Qwen2Config.from_pretrained(folder / "fresh", num_labels=1)),
        "teacher": Qwen2ForCausalLM(Qwen2Config.from_pretrained(folder / "fresh")),
    }
    for name, other in others.items():
        other.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        tar.add(folder, arcname="models")
    return base64.b64encode(packed.getvalue()).decode()


def put_models(kubectl: Kubectl) -> None:
    """On the volume."""
    unpack = "base64 -d | tar -xz -C /volume --no-same-owner && chmod -R a+rX /volume/models"
    with tempfile.TemporaryDirectory() as folder:
        kubectl("exec", "-i", Volume.POD, "--", "sh", "-c", unpack, input=packed_models(Path(folder)))


def scored() -> Manifest:
    """The quickstart with few steps, scored by a judge on the trainer's device and by a reward model on the engine's."""
    job = quickstart(SCORED, steps=SCORED_STEPS)
    spec = job["spec"]
    served = {"prefixCaching": False, "extraArgs": {"max_model_len": 128}}
    chat = {"extraArgs": {"max_model_len": 128, "chat_template": f"{MODELS}/chat.jinja"}}
    spec["components"] += [
        {"name": "grader_model", "role": "Judge", "placement": {"ranks": "0"}, "model": {"path": "models/tiny"}, "engine": served | chat},
        {"name": "scorer_model", "role": "Judge", "placement": {"ranks": "1"}, "model": {"path": f"{MODELS}/scorer"}, "engine": served},
    ]
    judge = {
        "component": "grader_model",
        "template": "{question}{response}",
        "sampling": {"temperature": 0.0, "max_tokens": 4, "min_tokens": 1},
        "parser": {"pattern": r"\d", "otherwise": 0.5},
    }
    spec["rewards"] = [
        {"name": "grader", "type": "LLMJudge", "judge": judge},
        {"name": "scorer", "type": "RewardModel", "rewardModel": {"component": "scorer_model", "template": "{question}{response}"}},
    ]
    spec["offload"] = {"residency": "Switching"}
    spec["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4}
    spec["report"] = {"trajectoriesEverySteps": 1}
    return job


def taught() -> Manifest:
    """examples/distillation.yaml with few steps; student and teacher know nothing of sums, so that a few steps bring them closer."""
    job = example("distillation", TAUGHT, steps=TAUGHT_STEPS)
    spec = job["spec"]
    spec["model"]["path"] = f"{MODELS}/fresh"
    (teacher,) = (component for component in spec["components"] if component["role"] == "Teacher")
    teacher["model"]["path"] = f"{MODELS}/teacher"
    spec["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4}
    spec["training"] |= {"learningRate": 3e-3, "warmupSteps": 0}
    return job


def metrics(volume: Volume, job: str) -> list[dict[str, float]]:
    """Metrics of all steps."""
    return [json.loads(line) for line in volume.read(f"{job}/metrics.jsonl").splitlines()]


@pytest.mark.begins(scored(), prepare=put_models)
def test_a_judge_and_a_reward_model_score_in_turn_with_trainer_and_engine(kubectl: Kubectl, volume: Volume) -> None:
    kubectl.wait(SCORED, "Succeeded", TRAINS_S)
    steps = metrics(volume, SCORED)
    assert [step["step"] for step in steps] == list(range(1, SCORED_STEPS + 1))
    for step in steps:
        assert step["offload/bytes"] > 0
        for name in ("grader", "scorer"):
            assert step[f"judge/failures/{name}"] == step["reward/errors"] == 0
            assert step[f"judge/calls/{name}"] >= 16
    rows = [json.loads(line) for line in volume.read(f"{SCORED}/trajectories/step-{SCORED_STEPS:06d}.jsonl").splitlines()]
    assert len({row["parts"]["scorer"] for row in rows}) > 1, "a score that does not depend on the response shows nothing"


@pytest.mark.begins(taught(), prepare=put_models)
def test_a_student_comes_closer_to_its_teacher(kubectl: Kubectl, volume: Volume) -> None:
    kubectl.wait(TAUGHT, "Succeeded", TRAINS_S)
    distances = [step["distillation/kl"] for step in metrics(volume, TAUGHT)]
    assert len(distances) == TAUGHT_STEPS
    assert fmean(distances[-3:]) < 0.8 * fmean(distances[:3]), distances
