"""The tiny mixture of experts: what it is made of, and that a warm start moves all of it."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeForCausalLM

from rljob_runtime.tiny.model import tiny_model
from rljob_runtime.tiny.settings import TinySize
from rljob_runtime.tiny.tokenizer import build_tokenizer
from rljob_runtime.tiny.warmstart import make_optimizers, train_step


def test_a_step_moves_every_expert_and_the_router_stays_with_adamw() -> None:
    tokenizer = build_tokenizer(["Calculate 67 + 21.", "Calculate 5 + 99."])
    torch.manual_seed(0)
    model = tiny_model(TinySize.MIXTURE, tokenizer)
    assert isinstance(model, Qwen3MoeForCausalLM)
    muon, adamw = optimizers = make_optimizers(model)
    named = {id(value): name for name, value in model.named_parameters()}
    of_muon, of_adamw = ({named[id(p)] for group in one.param_groups for p in group["params"]} for one in (muon, adamw))
    assert {name for name in of_muon if "experts" in name}
    assert {name for name in of_adamw if name.endswith("mlp.gate.weight")} == {f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 1)}
    assert of_muon | of_adamw == set(named.values())
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    ids = torch.randint(len(tokenizer), (64, 9), generator=torch.Generator().manual_seed(1))
    train_step(model, optimizers, (ids, ids.clone()), 1e-2)
    still = [
        name for name, value in model.named_parameters() if (value != before[name]).flatten(1 if value.ndim > 1 else 0).sum(-1).min() == 0
    ]
    assert still == []
