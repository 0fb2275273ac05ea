"""ROLL's examples of asynchronous training as `rljob convert` writes them, scaled to this machine and nothing else, train."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.lake import converted
from rljob_runtime.tiny import TinySummary
from tests.integration.jobs import Running, rljob
from tests.layout.tree import ROOT
from tests.support.sglang_installed import require_sglang

pytestmark = pytest.mark.slow
STEPS = 30
ROLLS = ROOT / "tests" / "data" / "convert"
SUMS: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
    "allow_negation": False,
    "format_style": "simple",
}
"""What the tiny model can learn."""

LAKE_STEPS = 20


def scaled(manifest: dict[str, Any], folder: Path) -> None:
    """From 24 accelerators and 7 billion parameters to 3 virtual devices and the tiny model; learning is as it was but for its rate.

    Nodes, devices, the model's path, the data's path, numbers of prompts, tokens and steps, the learning rate and its warm-up change.
    """
    spec = manifest["spec"]
    spec["nodeGroups"] = [
        {"name": "train", "devicesPerNode": 2, "deviceResource": "cpu"},
        {"name": "infer", "devicesPerNode": 1, "deviceResource": "cpu"},
    ]
    trainer, engine, _ = spec["components"]
    trainer |= {"placement": {"deviceMapping": "list(range(0,2))"}, "threadsPerWorker": 1}
    engine |= {"placement": {"deviceMapping": "[2]"}, "threadsPerWorker": 1}
    spec["model"]["path"] = "models/tiny"
    spec["data"]["train"][0]["jsonl"]["path"] = str(folder / "sums.jsonl")
    spec["rollout"] |= {"promptsPerStep": 32, "maxPromptTokens": 64, "maxResponseTokens": 8}
    spec["training"] |= {"steps": STEPS, "learningRate": 4e-4, "warmupSteps": 10}


def test_rolls_asynchronous_example_learns_with_its_engine_in_float16(
    quickstart_models: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SGLang, as the example says."""
    require_sglang()
    import reasoning_gym

    monkeypatch.chdir(tmp_path)
    rljob("convert", "--from", "roll", str(ROLLS / "roll-rlvr-async.yaml"), "--out", "job.yaml", cwd=tmp_path)
    manifest = yaml.safe_load((tmp_path / "job.yaml").read_text())
    scaled(manifest, tmp_path)
    engine = manifest["spec"]["components"][1]["engine"]
    assert (engine["type"], engine["dtype"]) == ("SGLang", "float16")
    (tmp_path / "models").symlink_to(quickstart_models(0))
    questions = reasoning_gym.create_dataset("basic_arithmetic", seed=1, size=32 * STEPS, **SUMS)
    rows = [{"prompt": question["question"], "ground_truth": question["answer"]} for question in questions]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    run = Running(tmp_path / "job", manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    summary = run.summary()
    print(json.dumps({key: summary[key] for key in ("reward_first", "reward_last")}))
    assert len(metrics) == STEPS
    assert max(m["staleness/max"] for m in metrics) == 1, "one batch ahead"
    assert 1e-4 < max(m["sync/probe_mean_abs_diff"] for m in metrics) < 0.08, "the types differ, and the weights are the same"
    assert summary["reward_first"]["mean"] <= 0.4
    assert summary["reward_last"]["mean"] >= summary["reward_first"]["mean"] + 0.2


def test_rolls_asynchronous_frozen_lake_learns(lake_model: TinySummary, tmp_path: Path) -> None:
    (tmp_path / "roll.yaml").write_text(converted.text())
    rljob("convert", "--from", "roll", "roll.yaml", "--out", "job.yaml", cwd=tmp_path)
    manifest = converted.scaled(yaml.safe_load((tmp_path / "job.yaml").read_text()), lake_model.folder, steps=LAKE_STEPS)
    assert manifest["spec"]["algorithm"]["advantage"] == {"estimator": "GRPO", "whiten": True, "clip": 0.2}
    assert manifest["spec"]["overlap"] == {"asyncGenerationRatio": 1.0, "updateMode": "Interrupt"}

    run = Running(tmp_path / "job", manifest)
    assert run.wait() == 0, run.output
    metrics = run.metrics()
    success = [m["episode/success"] for m in metrics]
    print([round(value, 3) for value in success])
    assert len(metrics) == LAKE_STEPS
    assert max(m["staleness/max"] for m in metrics) == 1, "one batch ahead"
    assert all(m["rollout/sequences"] == 128 for m in metrics)
    assert sum(m["episode/errors"] + m["episode/timeouts"] for m in metrics) == 0
    first, last = sum(success[:6]) / 6, sum(success[-6:]) / 6
    assert last >= first + 0.1, success
