"""A replayed route decides the experts and nothing else: against a plain transformers loop whose routers were replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from rljob_runtime.errors import ModelError
from rljob_runtime.routes import NO_ROUTE, RouteArray
from rljob_runtime.training.config import LoadBalancingConfig, PolicyConfig
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.model import layer_costs, load_model
from rljob_runtime.training.replay import check_routes, replay_of
from rljob_runtime.training.routers import choices_of
from rljob_runtime.training.step import run_micro_batch
from tests.support.rounding import LOGPROBS, assert_gradients_equal
from tests.support.routes import routes_of
from tests.support.trainers import save_model, tiny_qwen2, whole_policy

SMALL: dict[str, Any] = {
    **{"vocab_size": 31, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3},
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LATENT: dict[str, Any] = {"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
GROUPED: dict[str, Any] = {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MODELS: dict[str, PretrainedConfig] = {
    "deepseek_v2": DeepseekV2Config(
        **{**SMALL, **LATENT, **GROUPED, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 2},
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": DeepseekV3Config(**{**SMALL, **LATENT, **GROUPED, "num_key_value_heads": 4, "first_k_dense_replace": 1}),
    "glm4_moe": Glm4MoeConfig(**SMALL, **GROUPED, head_dim=8, first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=False),
    "glm4_moe_lite": Glm4MoeLiteConfig(**{**SMALL, **LATENT, **GROUPED, "num_key_value_heads": 4}, first_k_dense_replace=1),
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, mlp_only_layers=[1], norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=10, norm_topk_prob=False),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=5, num_experts_per_tok=2),
}
PROMPT = [3, 4, 5]
SEQUENCES = [[*PROMPT, 7, 8, 9, 10, 2], [*PROMPT, 7, 8, 11, 2], [*PROMPT, 12, 2], [20, 21, 22, 23, 2]]
"""The first three share a tree."""
LENGTHS = np.array([len(s) for s in SEQUENCES], dtype=np.int32)
TOKENS = np.array([t for s in SEQUENCES for t in s], dtype=np.int32)
PLACES = np.concatenate([np.arange(n, dtype=np.int32) for n in LENGTHS])
WANTED = (PLACES >= np.repeat([3, 3, 3, 2], LENGTHS)).astype(np.float32)
FORCED = routes_of(TOKENS, PLACES, layers=3, chosen=2, experts=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixtures")
    for name, config in MODELS.items():
        save_model(made / name, config, seed=5, bias_std=0.3)
    return made


def trainer(path: Path, **settings: Any) -> PreTrainedModel:
    """The trainer's model before it is sharded."""
    return whole_policy(path, replays_routes=True, **settings)


def run(model: PreTrainedModel, routes: RouteArray | None, budget: int = 1000) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Log-probs of the wanted tokens, and the gradients of their sum."""
    costs = layer_costs(model, torch.device("cpu"))
    micro_batches = make_micro_batches(TOKENS, LENGTHS, WANTED, budget, costs, None, routes)
    if budget == 1000:
        (micro,) = micro_batches
        assert micro.input_ids.size < sum(LENGTHS - 1)  # a tree
    found = np.zeros(TOKENS.size, dtype=np.float32)
    for micro in micro_batches:
        logprobs = run_micro_batch(model, micro, 1.0, 4)
        logprobs.sum().backward()
        found[micro.sources] = logprobs.detach().numpy()
    return found, {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


def plain(path: Path, forced: RouteArray | None) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The same by transformers alone, sequence by sequence, with routers whose choices are given."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    choices: dict[int, torch.Tensor] = {}

    def force(router: Any, layer: int) -> None:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits, experts = nn.functional.linear(hidden.view(-1, hidden.shape[-1]), router.weight), choices[layer]
            if path.name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite"):
                chosen = logits.sigmoid().gather(1, experts)
                weights = (chosen / chosen.sum(1, keepdim=True) if router.norm_topk_prob else chosen) * model.config.routed_scaling_factor
            elif path.name == "deepseek_v2":
                weights = logits.softmax(-1).gather(1, experts) * 1.5
            elif path.name == "qwen2_moe":
                weights = logits.softmax(-1).gather(1, experts)
            else:
                weights = logits.gather(1, experts).softmax(-1)
            return logits, weights, experts

        router.forward = forward

    for number, layer in enumerate(model.model.layers):
        if forced is not None and hasattr(layer.mlp, "gate"):
            force(layer.mlp.gate, number)
    found, begin = np.zeros(TOKENS.size, dtype=np.float32), 0
    for ids in SEQUENCES:
        own = slice(begin, begin + len(ids))
        choices.update({layer: torch.from_numpy(FORCED[own, layer]).long() for layer in range(3)})
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0] * torch.from_numpy(WANTED[own][1:])
        logprobs.sum().backward()
        found[begin + 1 : own.stop] = logprobs.detach().numpy()
        begin = own.stop
    return found, {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found[0], expected[0], **LOGPROBS)
    assert_gradients_equal(found[1], expected[1])


def assert_bits_equal(found: Any, expected: Any) -> None:
    assert np.array_equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert np.array_equal(found[1][name], gradient), name


@pytest.mark.parametrize("name", MODELS)
def test_forced_experts_give_the_log_probs_and_gradients_of_a_plain_loop(folder: Path, name: str) -> None:
    expected = plain(folder / name, FORCED)
    for budget in (1000, 6):
        found = run(trainer(folder / name), FORCED, budget)
        assert_equal(found, expected)
    free = plain(folder / name, None)
    assert np.abs(expected[0] - free[0]).max() > 0.05
    gates = [n for n in expected[1] if n.endswith("mlp.gate.weight")]
    assert len(gates) == (3 if name in ("qwen2_moe", "mixtral") else 2)
    assert all(np.abs(found[1][n]).max() > 1e-3 for n in gates)  # gradients flow through the weights of chosen experts


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "qwen3_moe", "qwen2_moe", "mixtral"])
def test_without_routes_nothing_changes_and_own_choices_replayed_give_the_same_bits(folder: Path, name: str) -> None:
    expected = run(whole_policy(folder / name), None)
    model = trainer(folder / name)
    assert_bits_equal(run(model, None), expected)
    model.zero_grad(set_to_none=True)
    none = np.full_like(FORCED, NO_ROUTE)
    assert_bits_equal(run(model, none), expected)


def test_tokens_without_a_route_are_routed_by_the_trainer(folder: Path) -> None:
    model = trainer(folder / "mixtral")
    mixed = FORCED.copy()
    mixed[: LENGTHS[:3].sum()] = NO_ROUTE
    found, free, forced = (run(model, routes)[0] for routes in (mixed, None, FORCED))
    cut = int(LENGTHS[:3].sum())
    np.testing.assert_allclose(found[:cut], free[:cut], **LOGPROBS)
    np.testing.assert_allclose(found[cut:], forced[cut:], **LOGPROBS)
    assert np.abs(found - free).max() > 0.01


def test_recomputed_layers_replay_the_same_routes(folder: Path) -> None:
    for budget in (1000, 6):
        found = run(trainer(folder / "qwen3_moe", activation_checkpointing=True), FORCED, budget)
        assert_equal(found, run(trainer(folder / "qwen3_moe"), FORCED, budget))


def test_a_batch_without_routes_forgets_those_before(folder: Path) -> None:
    model = trainer(folder / "mixtral")
    before = run(model, None)[0]
    run(model, FORCED)
    np.testing.assert_array_equal(run(model, None)[0], before)


def test_what_routers_chose_includes_replayed_choices(folder: Path) -> None:
    model = trainer(folder / "deepseek_v3", load_balancing=LoadBalancingConfig(coefficient=1.0))
    choices = choices_of(model)
    assert choices is not None
    assert [router.layer for router in choices.routers] == [1, 2]
    (micro,) = make_micro_batches(TOKENS, LENGTHS, WANTED, 1000, layer_costs(model, torch.device("cpu")), None, FORCED)
    assert micro.routes is not None
    run(model, FORCED)
    for router, experts in zip(choices.routers, choices.experts(), strict=True):
        np.testing.assert_array_equal(experts.numpy(), micro.routes[:, router.layer])
    run(model, None)
    assert any((experts.numpy() != micro.routes[:, layer]).any() for layer, experts in enumerate(choices.experts(), start=1))


def test_routes_of_another_model_are_refused(folder: Path) -> None:
    model = trainer(folder / "mixtral")
    check_routes(model, FORCED)
    check_routes(model, None)
    with pytest.raises(ValueError, match=r"routes have shape \(25, 2, 2\); the model has 3 layers and 2 experts per token"):
        check_routes(model, FORCED[:, :2])
    with pytest.raises(ValueError, match=r"routes span \[0, 5\] but layers have 5 experts"):
        check_routes(model, np.where(FORCED == 4, 5, FORCED).astype(np.int8))
    with pytest.raises(ValueError, match="the policy does not replay them"):
        check_routes(nn.Linear(1, 1), FORCED)


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_qwen2()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model type qwen2 has no routers; remove training\.routerReplay"):
        trainer(tmp_path)
    assert replay_of(load_model(PolicyConfig(model_path=str(tmp_path)), tmp_path)) is None
