"""The quickstart model's folder: loads, round-trips, is reused or refused. The full warm start's figures stand in tiny.json."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rljob_runtime.data.tokenizer import load_tokenizer
from rljob_runtime.errors import ModelError
from rljob_runtime.tiny import QUICKSTART, TINY_FILE, TinySize, TinyTask, make_tiny_model
from rljob_runtime.tiny.model import make
from rljob_runtime.tiny.warmstart import Example, WarmStartConfig, pass_rate

FAST = WarmStartConfig(max_rule_steps=6, noise_steps=3, calibration_rounds=0, batch_size=32)


def make_fast(folder, **options):
    return make(folder, config=FAST, target_pass=(0.0, 1.0), num_threads=1, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    seen = []
    summary = make_fast(tmp_path_factory.mktemp("models") / "tiny", progress=lambda phase, fraction: seen.append((phase, fraction)))
    return summary, seen


def test_the_folder_loads_in_transformers_and_round_trips(made):
    folder = made[0].folder
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    for text in ("Calculate 67 + 21.", "134", "1 3 4", " héllo\n\tworld  100% <tag>"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("134")["input_ids"]) == ["1", "3", "4"]
    assert len(tokenizer("Calculate 67 + 21.")["input_ids"]) == 9
    assert tokenizer.decode([*tokenizer("88")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "88"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Calculate 1 + 2."}], tokenize=False, add_generation_prompt=True)
    assert chat == "Calculate 1 + 2."
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert {p.name for p in folder.iterdir()} >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json", TINY_FILE}


DRIVER_IMPORTS = """
import sys
import rljob_runtime.entry.local_run
import rljob_runtime.training.model_info  # what trainers answer
from rljob_runtime.data.tokenizer import load_tokenizer
print(load_tokenizer(sys.argv[1], trust_remote_code=False)("134")["input_ids"])
print(*sorted({"torch", "vllm"} & set(sys.modules)))
"""


def test_a_driver_loads_the_tokenizer_without_torch_and_of_the_class_that_transformers_chooses(made):
    folder = made[0].folder
    ids, heavy = subprocess.run(
        [sys.executable, "-c", DRIVER_IMPORTS, folder], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    chosen = AutoTokenizer.from_pretrained(folder)
    assert type(load_tokenizer(str(folder), trust_remote_code=False)) is type(chosen)
    assert (ids, heavy) == (str(chosen("134")["input_ids"]), "")


def test_a_tokenizer_of_another_class_is_left_to_transformers(made, tmp_path):
    AutoTokenizer.from_pretrained(made[0].folder).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(made[0].folder / "config.json", tmp_path)
    assert type(load_tokenizer(str(tmp_path), trust_remote_code=False)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_a_folder_without_tokenizer_is_refused_with_the_field_to_set(tmp_path):
    with pytest.raises(ModelError, match=r"cannot be loaded(?s:.*)set spec\.model\.tokenizerPath"):
        load_tokenizer(str(tmp_path), trust_remote_code=False)


def test_the_summary_is_stored_and_progress_was_reported(made):
    summary, seen = made
    saved = json.loads((summary.folder / TINY_FILE).read_text())
    assert saved["sampled_pass_rate"] == summary.sampled_pass_rate
    assert saved["num_parameters"] == summary.num_parameters
    assert 250_000 < summary.num_parameters < 400_000
    assert (summary.rule_steps, summary.noise_steps, summary.num_measured) == (6, 3, 512)
    assert [phase for phase, _ in seen] == ["noise"] * 3 + ["done"]
    assert seen[-1][1] == 1.0
    assert [f for _, f in seen] == sorted(f for _, f in seen)


def test_the_same_parameters_reuse_the_folder_and_give_the_same_weights(made, tmp_path):
    again = make_fast(made[0].folder)
    assert again.reused
    assert again.fingerprint == made[0].fingerprint
    twin = make_fast(tmp_path / "twin")
    assert not twin.reused
    first, second = ((f / "model.safetensors").read_bytes() for f in (made[0].folder, twin.folder))
    assert first == second


def test_other_parameters_and_foreign_folders_are_refused(made, tmp_path):
    with pytest.raises(ModelError, match=r"made with other parameters \(seed 0, task basic_arithmetic\)"):
        make_fast(made[0].folder, seed=1)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="was not made by this command"):
        make_fast(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(ModelError, match="was not made by this command"):
        make_fast(tmp_path / "notes.txt")


def test_a_missed_target_and_a_task_without_numbers_leave_nothing_behind(tmp_path):
    with pytest.raises(ModelError, match=r"sampling solves 0\.\d\d\d of 512 prompts .* wanted 0.5 to 0.6"):
        make(tmp_path / "tiny", config=FAST, target_pass=(0.5, 0.6), num_threads=1)
    with pytest.raises(ModelError, match="needs whole numbers"):
        make_fast(tmp_path / "tiny", task=TinyTask(task="spell_backward"))
    with pytest.raises(ModelError, match="two shares"):
        make_tiny_model(tmp_path / "tiny", target_pass=(0.4, 0.2))
    assert list(tmp_path.iterdir()) == []


def test_the_ten_million_model_has_random_weights_and_its_size(tmp_path):
    summary = make_tiny_model(tmp_path / "ten", size=TinySize.TEN_MILLION, num_threads=1)
    assert 9_000_000 < summary.num_parameters < 11_000_000
    assert (summary.rule_steps, summary.noise_steps) == (0, 0)
    assert AutoModelForCausalLM.from_pretrained(summary.folder).config.num_hidden_layers == 8


def test_pass_rate_counts_exact_answers_and_leaves_the_random_state(made):
    folder = made[0].folder
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompts = ["Calculate 1 + 2.", "Calculate 30 + 40."]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt")
    generated = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    said = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    # Whatever the untrained model says, made the reference answer where it is a number, must count as solved; its successor must not.
    numbers = {p: int(s) for p, s in zip(prompts, said, strict=True) if s.isdigit() and str(int(s)) == s}
    before = torch.random.get_rng_state()
    for prompt, value in numbers.items():
        assert pass_rate(model, tokenizer, [Example(prompt=prompt, answer=value)], temperature=0.0, seed=0) == 1.0
        assert pass_rate(model, tokenizer, [Example(prompt=prompt, answer=value + 1)], temperature=0.0, seed=0) == 0.0
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_quickstart_task_is_two_digit_sums():
    assert QUICKSTART.params["operators"] == ["+"]
