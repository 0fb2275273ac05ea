"""Compiled decoder layers compared with the same layers run one operation at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rljob_api.vocabulary import LayerCompilation
from rljob_runtime.errors import ModelError
from rljob_runtime.training import compiling, model
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.lora import add_adapters
from tests.integration.test_trainer import gradients, make_batch, make_group_batch
from tests.integration.test_training_memory import build
from tests.support.trainers import StartPolicy, one_at_a_time, policy, save_model, tiny_qwen2
from tests.unit.api.model_configs import CONFIGS

BATCHES = [make_batch(0, 9), make_group_batch()]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartPolicy]:
    """Starts workers, one at a time; layers are gathered one by one, as those of larger models are."""
    monkeypatch.setattr(model, "ONE_UNIT_BYTES", 0)
    with one_at_a_time(partial(policy, save_model(tmp_path, tiny_qwen2(), seed=3))) as start:
        yield start


def assert_the_same(start: StartPolicy, **settings: Any) -> None:
    """Gradients and log-probs of padded and packed rows."""
    found = []
    for compilation in (LayerCompilation.DISABLED, LayerCompilation.ENABLED):
        worker = start(layer_compilation=compilation, **settings)
        results = [gradients(worker, batch, packed=packed) for batch in BATCHES for packed in (False, True)]
        logprobs = [worker.compute_logprobs(batch.token_ids, batch.lengths, 1.0) for batch in BATCHES]
        found.append([*results, {"log-probs": torch.from_numpy(np.concatenate(logprobs))}])
    for plain, compiled in zip(*found, strict=True):
        assert plain.keys() == compiled.keys()
        for name, tensor in plain.items():
            torch.testing.assert_close(compiled[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "settings"),
    [("aot_eager", {"activation_checkpointing": True}), ("eager", {"lora": LoraConfig(rank=2, alpha=4.0)})],
    ids=["checkpointing", "adapters"],
)
def test_compiled_layers_compute_the_same(
    start: StartPolicy, backend: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels, which torch makes in minutes on the CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    assert_the_same(start, **settings)
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0


def test_numbers_of_modules_are_constants_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As inputs they are tensors on the CPU, for which torch compiles C++ code on a GPU too."""
    inputs: list[torch.Tensor] = []

    def noted(graph: torch.fx.GraphModule, given: list[torch.Tensor]) -> torch.fx.GraphModule:
        inputs.extend(entry for entry in given if isinstance(entry, torch.Tensor))
        return graph

    dense = build(CONFIGS["qwen2"]).requires_grad_(False)
    layers = dense.model.layers
    add_adapters(layers, LoraConfig(rank=2, alpha=4.0), seed=0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=noted))
    torch._dynamo.reset()
    # torch's own patch: at its end, monkeypatch would delete the setting, which hides it for the rest of the process.
    with torch._dynamo.config.patch(specialize_float=False):
        compiling.compile_layers(layers)
        dense(torch.arange(7)[None]).logits.sum().backward()
    assert inputs
    assert [entry for entry in inputs if entry.dim() == 0] == []


def test_dense_models_are_compiled_on_a_gpu_and_mixtures_are_not() -> None:
    with torch.device("meta"):
        mixture = build(CONFIGS["qwen3_moe"])
    gpu = torch.device("cuda")
    assert not compiling.compiles_layers(mixture, PolicyConfig(model_path="x"), gpu)
    with torch.device("meta"):
        dense = build(CONFIGS["qwen3"] | {"vocab_size": 200_000})
    assert compiling.compiles_layers(dense, PolicyConfig(model_path="x"), gpu)
    assert not compiling.compiles_layers(dense, PolicyConfig(model_path="x"), torch.device("cpu"))
    with pytest.raises(ModelError, match="model type qwen3_moe is a mixture of experts"):
        compiling.compiles_layers(mixture, PolicyConfig(model_path="x", layer_compilation=LayerCompilation.ENABLED), gpu)
