"""A reward worker makes texts of token ids with the driver's own tokenizer files, and scores them in order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rljob_runtime.data.tokenizer import decode, load_tokenizer, tokenizer_files
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.packed import RewardBatch, reward_batch
from rljob_runtime.rewards.config import RewardConfig, RewardType
from rljob_runtime.rewards.worker import RewardWorker
from rljob_runtime.tiny.tokenizer import build_tokenizer
from tests.support.records import ids, make_prompt

FUNCTION = "def length(prompt, response, answer, metadata):\n    return float(len(response))\n"
TEXTS = ["12 apples", "", "é 7"]
IMPORTING = """
import sys
from pathlib import Path
from rljob_runtime.data.tokenizer import import_ahead, load_tokenizer, tokenizer_files
from rljob_runtime.rewards.config import RewardConfig, RewardType
from rljob_runtime.rewards.worker import RewardWorker

folder = Path(sys.argv[1])
assert "transformers" not in sys.modules
if sys.argv[2] == "driver":
    import_ahead(str(folder / "model"))
    before = set(sys.modules)
    load_tokenizer(str(folder / "model"), trust_remote_code=False)
else:
    config = RewardConfig(name="length", type=RewardType.FUNCTION, function="mine:length")
    worker = RewardWorker([config], log_file=folder / "log", folder=folder)
    before = set(sys.modules)
    worker.prepare(tokenizer_files(folder / "model", code=False), trust_remote_code=False)
    worker.close()
print("torch" in sys.modules, *(name for name in set(sys.modules) - before if name.startswith("transformers.")))
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's folder: a tokenizer, and files that no tokenizer reads."""
    folder = tmp_path / "model"
    build_tokenizer(["12 apples and 7 pears"]).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    (folder / "modeling_own.py").write_text("raise AssertionError\n")
    return folder


def batch_of(model: Path) -> RewardBatch:
    tokenizer = load_tokenizer(str(model), trust_remote_code=False)
    tokens = [ids(*tokenizer(text)["input_ids"], tokenizer.eos_token_id) for text in TEXTS]
    return reward_batch(["a", "b", "c"], [make_prompt(0)] * 3, ["stop"] * 3, tokens)


def test_texts_are_those_of_the_models_tokenizer_without_special_tokens(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    config = RewardConfig(name="length", type=RewardType.FUNCTION, function="mine:length")
    worker = RewardWorker([config], log_file=tmp_path / "log", folder=tmp_path)
    try:
        batch = batch_of(model)
        with pytest.raises(RewardSetupError, match="score was called before prepare"):
            worker.score(batch)
        worker.prepare(tokenizer_files(model, code=False), trust_remote_code=False)
        assert [(r.sample_id, r.score) for r in worker.score(batch)] == [(n, float(len(t))) for n, t in zip("abc", TEXTS, strict=True)]
        assert worker.score(batch.part(0, 0)) == []
    finally:
        worker.close()


def test_files_of_a_tokenizer_are_the_small_ones_and_code_only_where_it_is_trusted(model: Path) -> None:
    files = tokenizer_files(model, code=False)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(files)
    assert set(tokenizer_files(model, code=True)) - set(files) == {"modeling_own.py"}
    assert "model.safetensors" not in files
    assert decode(load_tokenizer(str(model), trust_remote_code=False), batch_of(model).responses()) == TEXTS


@pytest.mark.parametrize("process", ["driver", "reward worker"])
def test_what_a_tokenizer_takes_is_imported_before_it_is_loaded(tmp_path: Path, model: Path, process: str) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    command = [sys.executable, "-c", IMPORTING, str(tmp_path), process]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0)
    assert done.stdout.split() == ["False"]
