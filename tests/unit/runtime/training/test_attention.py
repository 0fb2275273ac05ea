"""Packed rows through whole models: losses and gradients are those of padded rows, for sequences and trees, on every way to attend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from rljob_runtime.records import IntArray
from rljob_runtime.training import model as models
from rljob_runtime.training.attention import Packing, Rows, Tree, block_mask, tree_mask
from rljob_runtime.training.microbatch import MicroBatch, make_micro_batches
from rljob_runtime.training.model import hidden_states, layer_costs
from rljob_runtime.training.sharing import LayerCosts
from tests.support.rounding import LOGPROBS, assert_gradients_equal

VOCAB = 61
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES),
    "llama, as many key heads": LlamaConfig(**SIZES | {"num_key_value_heads": 4}),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2),
}
Batch = tuple[IntArray, IntArray, np.ndarray]


def batch() -> Batch:
    """Two groups of which one has long and one short responses, that begin alike, and sequences of their own; mixed lengths."""
    rng = np.random.default_rng(5)
    sequences = []
    for prompt, lengths in ((30, (9, 9, 9, 4)), (5, (2, 3, 40)), (3, (50,)), (7, (7,))):
        first = rng.integers(0, VOCAB, prompt)
        responses = [rng.integers(0, VOCAB, length) for length in lengths]
        responses += [np.r_[responses[0][:2], rng.integers(0, VOCAB, 3)]]
        sequences += [(np.r_[first, one], np.r_[np.zeros(prompt), np.ones(one.size)]) for one in responses]
    tokens = np.concatenate([one for one, _ in sequences]).astype(np.int32)
    return (
        tokens,
        np.array([one.size for one, _ in sequences], np.int32),
        np.concatenate([mask for _, mask in sequences]).astype(np.float32),
    )


def numbers(model: PreTrainedModel, micro_batches: list[MicroBatch], num_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of all wanted tokens (T,), and the gradient of a loss of them."""
    model.zero_grad()
    logprobs = torch.zeros(num_tokens)
    for micro in micro_batches:
        packing = None if micro.packed is None else Packing(micro.packed, torch.device("cpu"))
        hidden = hidden_states(model, torch.from_numpy(micro.input_ids), torch.from_numpy(micro.positions), packing)
        targets = torch.from_numpy(micro.targets)
        found = model.get_output_embeddings()(hidden).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
        sources = torch.from_numpy(micro.sources)
        (found * torch.cos(sources.float())).sum().div(num_tokens).backward()
        logprobs[sources] = found.detach()
    return logprobs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return made(request.param)


def made(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    models.prepare_attention(made)
    return made


def variants(costs: LayerCosts) -> Iterator[tuple[str, LayerCosts, set[type]]]:
    """Costs that make the attention go each of its ways."""
    yield "sequences alone", dataclasses.replace(costs, may_share=False), {Rows}
    yield "a call for each length", dataclasses.replace(costs, may_share=False, call_flops=0.0), {Rows}
    yield "masked trees", dataclasses.replace(costs, call_flops=1e12), {Rows}
    yield "branches", dataclasses.replace(costs, call_flops=0.0), {Rows, Tree}


def test_packed_rows_give_the_log_probs_and_gradients_of_padded_rows(model: PreTrainedModel) -> None:
    tokens, lengths, wanted = batch()
    costs = layer_costs(model, torch.device("cpu"))
    assert costs.may_pack
    logprobs, gradients = numbers(model, make_micro_batches(tokens, lengths, wanted, 400), tokens.size)
    for name, variant, kinds in variants(costs):
        for budget in (10_000, 90):
            micro_batches = make_micro_batches(tokens, lengths, wanted, budget, variant)
            parts = [part for m in micro_batches if m.packed for part in Packing(m.packed, torch.device("cpu")).parts]
            assert {type(part) for part in parts} == kinds, name
            got, got_gradients = numbers(model, micro_batches, tokens.size)
            torch.testing.assert_close(got, logprobs, **LOGPROBS, msg=name)
            assert_gradients_equal(got_gradients, gradients)


def test_recomputed_layers_are_packed_as_well() -> None:
    tokens, lengths, wanted = batch()
    model = made(CONFIGS["qwen3"])
    micro_batches = make_micro_batches(tokens, lengths, wanted, 10_000, layer_costs(model, torch.device("cpu")))
    _, gradients = numbers(model, micro_batches, tokens.size)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, gradient in numbers(model, micro_batches, tokens.size)[1].items():
        torch.testing.assert_close(gradient, gradients[name], atol=0, rtol=0, msg=name)


def test_the_kernel_for_cuda_computes_the_same() -> None:
    """FlexAttention as plain operations on the CPU, which has no backward there: its mask, scale and heads are right."""
    model = made(CONFIGS["qwen3"])
    (micro,) = make_micro_batches(*batch(), 10_000, layer_costs(model, torch.device("cpu")))
    assert micro.packed is not None
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, heads, micro.input_ids.size, 8) for heads in (4, 2, 2))
    until = torch.from_numpy(micro.packed.until)
    with torch.no_grad():
        flex = flex_attention(query, key, value, block_mask=block_mask(until, compiled=False), scale=0.3, enable_gqa=True)
        parts = Packing(micro.packed, torch.device("cpu")).attend(query, key, value, 0.3)
        dense = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=tree_mask(until[None]), scale=0.3, enable_gqa=True
        )
    torch.testing.assert_close(parts.transpose(1, 2), dense, **LOGPROBS)
    torch.testing.assert_close(flex, dense, **LOGPROBS)
