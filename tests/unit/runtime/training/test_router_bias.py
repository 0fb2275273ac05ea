"""Correction biases follow the load of experts, and what counts as load."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig

from rljob_api.memory.shape import LATENT_TYPES
from rljob_api.rules.model import BIASED_MODELS, MIXTURE_MODELS, can_divide
from rljob_runtime.errors import ModelError
from rljob_runtime.training.balance import routing_sums
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.model import decoder_layers, load_model
from rljob_runtime.training.router_bias import ExpertLoad
from rljob_runtime.training.routers import Choices, find_routers, keep_biases_float32
from rljob_runtime.training.sequence_parallel import DividedTokens
from rljob_runtime.weightsync.checkpoint_names import checkpoint_parts, is_router_bias
from tests.unit.api.model_configs import CONFIGS

SMALL: dict[str, Any] = {
    **{"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "moe_intermediate_size": 4, "num_experts_per_tok": 2},
}
LATENT: dict[str, Any] = {"q_lora_rank": None, "kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 4}
DEEPSEEK = DeepseekV3Config(**SMALL, **LATENT, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1)


class FakeTopkRouter(nn.Module):
    """Chooses what it gets."""

    def __init__(self, *, has_bias: bool = True) -> None:
        super().__init__()
        self.num_experts = 3
        if has_bias:
            self.register_buffer("e_score_correction_bias", torch.tensor([0.0, 0.5, -0.5]))

    def forward(self, experts: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, experts


class Group:
    """Of one rank."""

    def size(self) -> int:
        return 1


def chosen(*by_layer: list[list[int]], has_bias: bool = True) -> Choices:
    layers = [FakeTopkRouter(has_bias=has_bias) for _ in by_layer]
    choices = Choices(find_routers([nn.Sequential(layer) for layer in layers]))
    for layer, experts in zip(layers, by_layer, strict=True):
        layer(torch.tensor(experts))
    return choices


def test_biases_move_by_the_rate_against_the_load_of_their_layer() -> None:
    choices = chosen([[0], [0], [1], [2]], [[1], [2], [0], [1]])
    load = ExpertLoad(choices, torch.device("cpu"))
    load.add(torch.tensor([0, 1, 2]))  # 2, 1, 0 and 1, 1, 1
    metrics = load.apply(0.25, [cast(Any, Group())])
    first, second = (router.bias for router in choices.routers)
    assert first is not None
    assert second is not None
    assert first.tolist() == [-0.25, 0.5, -0.25]
    assert second.tolist() == [0.0, 0.5, -0.5]  # of balanced experts they stay
    assert metrics == {"train/layer_expert_load_max": 1.5, "train/router_bias_max": 0.5}


def test_passes_of_an_update_add_up_and_a_position_counts_as_often_as_it_is_named() -> None:
    choices = chosen([[0, 1], [1, 2]])
    load = ExpertLoad(choices, torch.device("cpu"))
    load.add(torch.tensor([0, 1, 1]))
    load.add(torch.tensor([1]))
    assert load.apply(0.0, [cast(Any, Group())])["train/layer_expert_load_max"] == pytest.approx(4 / (8 / 3))  # 1, 4, 3


def test_ranks_that_divide_tokens_count_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of three tokens, of which the first of two ranks has two each, and the second one with a token of padding."""
    counted: list[list[list[float]]] = []
    monkeypatch.setattr(dist, "all_reduce", lambda counts, group: counted.append(counts.tolist()))
    experts, positions = torch.tensor([[0], [1], [2], [0], [0], [1]]), torch.tensor([0, 1, 2, 4, 4, 5])
    for rank, own in enumerate(([0, 1, 3, 4], [2, 2, 5, 5])):
        group, layer = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank), nn.Identity()
        tokens = DividedTokens(cast(Any, group))
        tokens.attach(layer, nn.Identity())
        layer(torch.zeros(2, 3, 1))
        load = ExpertLoad(chosen(experts[own].tolist()), torch.device("cpu"), tokens)
        load.add(positions)
        load.apply(0.0, [cast(Any, group)])
    assert counted == [[[3.0, 1.0, 0.0]], [[0.0, 1.0, 1.0]]]


@pytest.mark.parametrize("has_bias", [True, False])
def test_the_loss_counts_choices_and_shares_that_sum_to_one(has_bias: bool) -> None:
    logits = [torch.tensor([[3.0, 2.0, 1.0], [1.0, 2.0, 3.0]])]
    choices = chosen([[2, 0], [1, 2]], has_bias=has_bias)
    sums = routing_sums(choices.routers, choices.experts(), logits, torch.tensor([0, 1, 1]))
    assert sums[0].tolist() == [1.0, 2.0, 3.0]
    scores = logits[0].sigmoid() if has_bias else logits[0].exp()
    shares = scores / scores.sum(1, keepdim=True)
    torch.testing.assert_close(sums[1], shares[0] + 2 * shares[1])


def test_biases_stay_float32_in_a_bfloat16_model() -> None:
    model = AutoModelForCausalLM.from_config(DEEPSEEK, dtype=torch.bfloat16)
    keep_biases_float32(model.modules())
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def test_a_frozen_policy_reads_biases_as_they_are(tmp_path: Path) -> None:
    """Its files are read shard by shard, although transformers keeps a part of it in float32."""
    model = AutoModelForCausalLM.from_config(DEEPSEEK)
    model.model.layers[1].mlp.gate.e_score_correction_bias.copy_(torch.tensor([0.1, -0.2, 0.3, 1.001]))
    model.save_pretrained(tmp_path)
    frozen = load_model(PolicyConfig(model_path=str(tmp_path), trainable=False, dtype="bfloat16"), tmp_path)
    assert frozen.weight_files is not None
    frozen.weight_files.fill(frozen, torch.device("cpu"))
    bias = frozen.model.layers[1].mlp.gate.e_score_correction_bias
    assert bias.tolist() == model.model.layers[1].mlp.gate.e_score_correction_bias.tolist()


def test_what_has_no_bias_to_move_is_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SMALL, num_experts=4, head_dim=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="routers of model type qwen3_moe have no correction bias; remove"):
        load_model(PolicyConfig(model_path=str(tmp_path), router_bias_update_rate=0.001), tmp_path)
    for frozen in ({"trainable": False}, {"lora": LoraConfig(rank=2, alpha=4.0)}):
        with pytest.raises(ValueError, match=r"router_bias_update_rate is 0.001 with routers that are not trained"):
            PolicyConfig(model_path="m", router_bias_update_rate=0.001, **cast(Any, frozen))


def test_types_that_can_be_trained_have_the_routers_that_rules_and_pages_say() -> None:
    """Of the installed transformers; names are those of the checkpoint."""
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    table = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    rows = {kind: row for row in table for kind in MIXTURE_MODELS if f"`{kind}`" in row[0]}
    configs = CONFIGS | {"qwen3_moe": CONFIGS["qwen3_moe, all sparse"]}
    for kind in MIXTURE_MODELS:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**configs[kind]))
        routers = find_routers(decoder_layers(model))
        assert routers, kind
        assert {router.bias is not None for router in routers} == {kind in BIASED_MODELS}, kind
        biases = {part.parameter for name, part in checkpoint_parts(model).items() if is_router_bias(name)}
        assert len(biases) == (len(routers) if kind in BIASED_MODELS else 0), kind
        assert rows[kind][-1].startswith("yes") is (kind in BIASED_MODELS), kind
        assert ("latent" in rows[kind][2]) is (kind in LATENT_TYPES), kind
        assert (rows[kind][4] == "yes") is can_divide(kind), kind
