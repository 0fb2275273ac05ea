"""The model of examples/frozen-lake.yaml: played with a cache as without one; made, it half knows the way; trained, all of it."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from rljob_runtime.environments.codec import Codec
from rljob_runtime.errors import ModelError
from rljob_runtime.tiny import FROZEN_LAKE, TINY_FILE, TinySize, TinySummary, lake
from rljob_runtime.tiny.lake import LakeConfig, lake_tokenizer, make_lake, warm_start_lake
from rljob_runtime.tiny.lake_corpus import MAX_RESPONSE, PROMPT, Episode
from rljob_runtime.tiny.lake_play import play
from rljob_runtime.tiny.model import model_config
from tests.integration.jobs import Running
from tests.layout.tree import ROOT

WINDOW = 5
"""Steps whose success is averaged."""
FAST = LakeConfig(rule_steps=4, noise_steps=2, batch_size=8, num_demonstrations=40, num_probed=8, num_measured=16, calibration_rounds=0)


def make_fast(folder: Path, **options):
    return make_lake(folder, config=FAST, target_success=(0.0, 1.0), num_threads=1, **options)


@torch.no_grad()
def play_alone(model, tokenizer, number: int) -> bool:
    """One episode, each token from all before it."""
    episode = Episode(Codec(tokenizer, PROMPT))
    episode.begin(number)
    while not episode.done:
        ids: list[int] = []
        while len(ids) < MAX_RESPONSE and tokenizer.eos_token_id not in ids:
            ids.append(int(model(torch.tensor([episode.ids + ids])).logits[0, -1].argmax()))
        episode.act(ids, tokenizer.decode(ids, skip_special_tokens=True), learned=False)
    return episode.success


def test_many_episodes_at_once_are_played_as_each_alone(monkeypatch):
    torch.manual_seed(0)
    played = []

    def counted(model, tokenizer, seeds, **options):
        played.append(len(seeds))
        return play(model, tokenizer, seeds, **options)

    monkeypatch.setattr(lake, "play", counted)
    tokenizer = lake_tokenizer()
    model = Qwen2ForCausalLM(model_config(TinySize.TINY, tokenizer))
    warm_start_lake(model, tokenizer, LakeConfig(**{name: getattr(FAST, name) for name in FAST.__slots__} | {"rule_steps": 10}), seed=0)
    assert played == [FAST.num_probed, FAST.num_probed, FAST.num_measured, FAST.num_measured], "no more than its settings say"
    together = [play(model, tokenizer, [number], temperature=0.0, seed=0).success > 0 for number in range(4)]
    assert together == [play_alone(model, tokenizer, number) for number in range(4)]
    assert play(model, tokenizer, range(4), temperature=0.0, seed=0).success == sum(together) / 4


@pytest.mark.slow
def test_a_made_folder_loads_is_a_function_of_the_seed_and_is_used_again(tmp_path):
    first, second = make_fast(tmp_path / "a"), make_fast(tmp_path / "b")
    weights = [AutoModelForCausalLM.from_pretrained(made.folder).state_dict() for made in (first, second)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    tokenizer = AutoTokenizer.from_pretrained(first.folder)
    assert [tokenizer.decode([token]) for token in tokenizer.encode(" P F\n H G")] == [" P", " F", "\n", " H", " G"]
    assert json.loads((first.folder / TINY_FILE).read_text())["task"] == FROZEN_LAKE
    assert make_fast(tmp_path / "a").reused
    with pytest.raises(ModelError, match="other parameters"):
        make_fast(tmp_path / "a", seed=1)


@pytest.mark.slow
def test_the_made_model_half_knows_the_way(lake_model: TinySummary):
    """On maps that neither demonstrations nor calibration had, sampled and at its most likely."""
    made = lake_model
    tokenizer, model = AutoTokenizer.from_pretrained(made.folder), AutoModelForCausalLM.from_pretrained(made.folder)
    sampled = play(model, tokenizer, range(30_000_000, 30_001_000), temperature=1.0, seed=1)
    assert 0.2 <= made.sampled_pass_rate <= 0.28
    assert 0.17 <= sampled.success <= 0.31
    assert sampled.valid >= 0.98
    assert made.greedy_pass_rate > made.sampled_pass_rate


@pytest.mark.slow
def test_it_learns_the_rest_of_the_way_while_the_next_batch_is_played(
    lake_model: TinySummary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The example, cut after so many steps as the rise takes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(lake_model.folder.parent)
    manifest = yaml.safe_load((ROOT / "examples" / "frozen-lake.yaml").read_text())
    manifest["spec"]["training"]["steps"] = 40
    run = Running(tmp_path, manifest)
    assert run.wait() == 0, run.output
    rows = run.metrics()
    success = [row["episode/success"] for row in rows]
    first, last = sum(success[:WINDOW]) / WINDOW, sum(success[-WINDOW:]) / WINDOW
    assert last >= first + 0.3
    assert max(row["staleness/max"] for row in rows) == 1
    assert sum(row["episode/errors"] + row["episode/timeouts"] for row in rows) == 0
