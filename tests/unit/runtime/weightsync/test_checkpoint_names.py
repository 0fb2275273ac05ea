"""Which names checkpoints have for a model's parameters, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig, Qwen3NextConfig, core_model_loading

from rljob_runtime.errors import ModelError
from rljob_runtime.weightsync.checkpoint_names import checkpoint_parts

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
}
LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}


def model(config: PretrainedConfig) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_convolution_beside_a_mixture_is_one_tensor():
    made = model(Qwen3NextConfig(**SIZES, **LINEAR, num_hidden_layers=1, layer_types=["linear_attention"]))
    parts = checkpoint_parts(made)
    kernel = parts["model.layers.0.linear_attn.conv1d.weight"]
    assert (kernel.shape, kernel.expert) == ((48, 1, 4), None)
    gate, up = (parts[f"model.layers.0.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up"))
    assert [(part.expert, part.first_row, part.shape) for part in (gate, up)] == [(3, 0, (16, 32)), (3, 16, (16, 32))]


@pytest.mark.parametrize("kinds", ["dense", "experts"])
def test_tensors_that_the_checkpoint_joins_are_refused(kinds: str, monkeypatch: pytest.MonkeyPatch):
    """Here two norms, and the experts of a layer one below the other."""

    def joined(_: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = dict(tensors)
        names = [name for name in found if name.endswith("norm.weight" if kinds == "dense" else "experts.down_proj")]
        if names:
            found[names[0]] = torch.cat([found.pop(name).flatten() for name in names])
        return found

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", joined)
    message = "no block of rows" if kinds == "dense" else "rows of several experts"
    with pytest.raises(ModelError, match=message):
        checkpoint_parts(model(Qwen3MoeConfig(**SIZES, num_hidden_layers=1)))
