"""The value head in the place of a language model's."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rljob_runtime.training.value_head import VALUE_HEAD, replace_head

SIZES = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("kind", "config"),
    [(Qwen2ForCausalLM, Qwen2Config(num_key_value_heads=1, **SIZES)), (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES))],
)
def test_a_critic_has_no_output_embeddings(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """GPT-NeoX included, whose own method asks for the head by its name."""
    model = kind(config)
    replace_head(model)
    assert model.get_output_embeddings() is None
    assert torch.count_nonzero(model.get_submodule(VALUE_HEAD).weight) == 0
