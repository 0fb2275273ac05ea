"""What both sides of bench.trl are given."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path

import pytest
import yaml

from bench.trl import workload
from tests.support.data_builders import make_tokenizer


def test_prompts_are_written_as_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's side compares its token ids with them."""
    model = tmp_path / "tiny"
    make_tokenizer().save_pretrained(model)
    monkeypatch.setattr(workload, "make_tiny_model", lambda folder: types.SimpleNamespace(num_parameters=1))
    prepared = workload.prepare(workload.QUICK, tmp_path, steps=1, tiny_model=model)
    rows = [json.loads(line) for line in prepared.prompts_file.read_text().splitlines()]
    spec = yaml.safe_load(prepared.job_file.read_text())["spec"]
    assert len(rows) == prepared.total_steps * spec["rollout"]["promptsPerStep"]
    assert all(isinstance(token, int) for row in rows for token in row["token_ids"])


def test_adapters_are_the_only_difference_of_the_lora_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer().save_pretrained(tmp_path / "made")

    def make_model(folder: Path, seed: int) -> int:
        shutil.copytree(tmp_path / "made", folder)
        return 1

    monkeypatch.setattr(workload.lengths, "make_model", make_model)
    specs = {}
    for chosen in (workload.HEAVY, workload.ADAPTERS):
        prepared = workload.prepare(chosen, tmp_path / chosen.key, steps=1, tiny_model=tmp_path / "made")
        specs[chosen.key] = yaml.safe_load(prepared.job_file.read_text())["spec"]
    heavy, adapters = specs["ii"], specs["iii"]
    assert adapters["model"].pop("lora") == {"rank": 16}
    assert (heavy["rollout"].pop("maxResponseTokens"), adapters["rollout"].pop("maxResponseTokens")) == (256, 64)
    for spec in (heavy, adapters):
        spec["model"].pop("path")
        spec.pop("data")
    assert heavy == adapters
