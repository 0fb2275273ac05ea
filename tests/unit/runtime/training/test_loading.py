"""Reading a process's shards from a checkpoint's files: which block goes where, and what is said of files that do not fit."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rljob_runtime.errors import ModelError
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.loading import pieces, without_weights
from rljob_runtime.training.parallel import local_tensor
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.checkpoint_names import NamedPart
from tests.support.pace import HANG_S
from tests.support.ports import free_port
from tests.support.trainers import save_model, tiny_qwen2
from tests.unit.api.model_configs import CONFIGS

SMALL_CONFIGS = {name: config for name, config in CONFIGS.items() if config["hidden_size"] == 64}


@given(st.data())
def test_the_blocks_of_a_shard_are_the_shard(data: st.DataObject) -> None:
    """Of a mixture's parameter, whose experts have two matrices each in the checkpoint, and of a plain one."""
    experts, gate_rows, up_rows, columns = (data.draw(st.integers(1, 4)) for _ in range(4))
    whole = torch.arange(experts * (gate_rows + up_rows) * columns, dtype=torch.float32).view(experts, gate_rows + up_rows, columns)
    files = {}
    parts = []
    for expert in range(experts):
        for name, first, rows in (("gate", 0, gate_rows), ("up", gate_rows, up_rows)):
            files[f"{expert}.{name}"] = whole[expert, first : first + rows]
            parts.append((f"{expert}.{name}", NamedPart(parameter="experts", shape=(rows, columns), expert=expert, first_row=first)))
    if data.draw(st.booleans(), label="plain"):
        whole = whole[0]
        files, parts = {"plain": whole}, [("plain", NamedPart(parameter="plain", shape=tuple(whole.shape)))]
    offsets = [data.draw(st.integers(0, size)) for size in whole.shape]
    sizes = [data.draw(st.integers(0, size - offset)) for size, offset in zip(whole.shape, offsets, strict=True)]
    shard = torch.full(sizes, -1.0)
    for piece in pieces(parts, tuple(whole.shape), sizes, offsets):
        shard[piece.target] = files[piece.name][piece.source]
    assert torch.equal(shard, whole[tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))])


def test_parameters_without_memory_keep_ties_and_buffers_are_real() -> None:
    with without_weights():
        model = AutoModelForCausalLM.from_config(tiny_qwen2(tie_word_embeddings=True))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert torch.equal(model.base_model.rotary_emb.inv_freq, AutoModelForCausalLM.from_config(tiny_qwen2()).base_model.rotary_emb.inv_freq)
    assert not nn.Linear(2, 2).weight.is_meta, "outside the block modules are as ever"


@pytest.fixture
def started() -> Iterator[list[PolicyWorker]]:
    workers: list[PolicyWorker] = []
    yield workers
    for worker in workers:
        worker.shutdown()


def start(started: list[PolicyWorker], config: PolicyConfig) -> dict[str, torch.Tensor]:
    """Parameters and buffers of a policy of one process."""
    worker = PolicyWorker(config, rank=0, world_size=1)
    worker.setup("127.0.0.1", free_port(), timeout_s=HANG_S)
    started.append(worker)
    tensors = (*worker.model.named_parameters(), *worker.model.named_buffers())
    return {name: local_tensor(tensor.detach()) for name, tensor in tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SMALL_CONFIGS)
def test_a_model_is_what_transformers_loads(
    name: str, dtype: str, tmp_path: Path, started: list[PolicyWorker], caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen: then it has the computation's dtype, as transformers gives it."""
    fields = {key: value for key, value in SMALL_CONFIGS[name].items() if key != "model_type"}
    save_model(tmp_path, AutoConfig.for_model(SMALL_CONFIGS[name]["model_type"], **fields), seed=1)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    wanted = dict((*plain.named_parameters(), *plain.named_buffers()))
    found = start(started, PolicyConfig(model_path=str(tmp_path), dtype=dtype, trainable=False))
    assert found.keys() == wanted.keys()
    assert not [key for key in wanted if found[key].dtype != wanted[key].dtype or not torch.equal(found[key], wanted[key])]
    assert "whole model" not in caplog.text


def test_adapters_begin_as_they_do_on_a_whole_model(tmp_path: Path, started: list[PolicyWorker]) -> None:
    save_model(tmp_path, tiny_qwen2(), seed=1)
    found = start(started, PolicyConfig(model_path=str(tmp_path), lora=LoraConfig(rank=2, alpha=4.0, target_modules=()), seed=3))
    adapters = {key: tensor for key, tensor in found.items() if "lora_" in key}
    assert adapters
    assert all(tensor.any() == ("lora_a" in key) for key, tensor in adapters.items())


def test_names_that_the_files_do_not_have_are_left_to_transformers(
    tmp_path: Path, started: list[PolicyWorker], caplog: pytest.LogCaptureFixture
) -> None:
    """Here a checkpoint of the layers alone, whose names begin without the prefix."""
    save_model(tmp_path, tiny_qwen2(tie_word_embeddings=True), seed=1)
    weights = load_file(tmp_path / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(short, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        found = start(started, PolicyConfig(model_path=str(tmp_path)))
    assert not [key for key in weights if not torch.equal(found[key], weights[key])]
    assert f"every process loads the whole model of {tmp_path}: {len(weights)} of its tensors have other names in the files" in caplog.text


def test_missing_weights_are_not_left_random(tmp_path: Path) -> None:
    save_model(tmp_path, tiny_qwen2(), seed=1)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    worker = PolicyWorker(PolicyConfig(model_path=str(tmp_path)), rank=0, world_size=1)
    with pytest.raises(ModelError, match=r"has no weights for 1 of the model's tensors, model\.norm\.weight among them"):
        worker.setup("127.0.0.1", free_port(), timeout_s=HANG_S)


def test_a_config_of_another_size_is_named_with_both_shapes(tmp_path: Path) -> None:
    save_model(tmp_path, tiny_qwen2(), seed=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    worker = PolicyWorker(PolicyConfig(model_path=str(tmp_path)), rank=0, world_size=1)
    with pytest.raises(ModelError) as caught:
        worker.setup("127.0.0.1", free_port(), timeout_s=HANG_S)
    assert "mlp.gate_proj.weight in model.safetensors has shape (40, 24), but the model of config.json has (48, 24)" in str(caught.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_model(tmp_path, tiny_qwen2(), seed=1)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-100])
    worker = PolicyWorker(PolicyConfig(model_path=str(tmp_path)), rank=0, world_size=1)
    with pytest.raises(ModelError, match=f"model folder {tmp_path}: its weights cannot be read: SafetensorError"):
        worker.setup("127.0.0.1", free_port(), timeout_s=HANG_S)
