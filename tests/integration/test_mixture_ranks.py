"""Mixtures of experts on one rank and two against a plain transformers loop: gradients, load balancing, weights, checkpoints, exports.

The two are data-parallel, or share each sequence. Experts are an odd number, so that ranks have unequally many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rljob_api.rules.model import BIASED_MODELS
from rljob_runtime.records import TrainBatch
from rljob_runtime.training import model as model_module
from rljob_runtime.training.config import LoadBalancingConfig, LoraConfig, PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.replay import replay_of
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.rank_processes import fork_ranks, full_gradients, join, packed_weights, random_batch, read, run_script, write
from tests.support.rounding import assert_gradients_equal
from tests.support.routes import routes_of
from tests.support.trainers import StartPolicy, one_at_a_time, policy, save_model

VOCAB = 61
SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "router_aux_loss_coef": 0.5},
}
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


def biased(num_experts: int) -> dict[str, Any]:
    """A dense layer before those of experts, routers with groups and biases."""
    return {
        **{**SMALL, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": num_experts, "n_group": 3, "topk_group": 2},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_shared_experts": 1, "routed_scaling_factor": 1.0},
    }


def deepseek(num_experts: int) -> DeepseekV3Config:
    """Latent attention, and what :func:`biased` has."""
    return DeepseekV3Config(
        **biased(num_experts),
        **{"q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    )


MODELS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, mlp_only_layers=[1], tie_word_embeddings=True, norm_topk_prob=True),
    "qwen2_moe": Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=10),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2),
    "deepseek_v3": deepseek(9),
}
BIAS_RATE, BIAS_STD = 0.01, 0.05
PARTS = {1: [slice(0, 11)], 2: [slice(0, 9), slice(9, 11)]}
"""Sequences of each rank; uneven, so that the first has more micro-batches."""
NUM_PORTS = 8


def settings(folder: Path, **changes: object) -> PolicyConfig:
    """Small micro-batches; a large eps keeps Adam from amplifying rounding."""
    config = PolicyConfig(model_path=str(folder), learning_rate=1e-3, eps=1e-3, token_budget=24, load_balancing=LoadBalancingConfig())
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def bias_rate(name: str) -> float:
    return BIAS_RATE if name in BIASED_MODELS else 0.0


def gradients(worker: PolicyWorker, batch: TrainBatch) -> dict[str, np.ndarray]:
    (prepared,) = prepare_batches([batch], worker.config, torch.device("cpu"), worker.ready.costs)
    assert (len(prepared.micro_batches) > 1) is (worker.config.shared_budget == 24)
    accumulate_gradients(worker.model, prepared, worker.config, StepMeter(torch.device("cpu")), fresh=True)
    found = full_gradients(worker)
    worker.model.zero_grad(set_to_none=True)
    return found


def with_routes(batch: TrainBatch, worker: PolicyWorker) -> TrainBatch:
    """Other experts than the routers would choose; the same for a token in whatever part it is."""
    replay = replay_of(worker.model)
    assert replay is not None
    places = np.concatenate([np.arange(length, dtype=np.int32) for length in batch.lengths])
    routes = routes_of(batch.token_ids, places, replay.num_layers, replay.top_k, replay.num_experts)
    return dataclasses.replace(batch, routes=routes)


def run_divided(rank: int, port: int, base: Path) -> None:
    """Two ranks that share each sequence."""
    worker = PolicyWorker(settings(base / "qwen3_moe", replays_routes=True, token_budget=12, context_parallel_size=2), rank, 2)
    join(worker, port)
    try:
        batch = random_batch(VOCAB, 0)
        arrays = {f"grad/{n}": g for n, g in gradients(worker, batch).items()}
        arrays |= {f"replay/{n}": g for n, g in gradients(worker, with_routes(batch, worker)).items()}
        metrics = worker.train_step([random_batch(VOCAB, 1)], step=0)
        arrays |= {f"metric/{n}": np.array(v) for n, v in metrics.items() if not n.startswith("time/")}
        if rank == 0:
            write(base, "divided", arrays)
    finally:
        worker.shutdown()


def run_layout(rank: int, port: int, base: Path, name: str, world_size: int) -> None:
    if rank >= world_size:
        return
    config = settings(base / name, replays_routes=True, router_bias_update_rate=bias_rate(name))
    worker = PolicyWorker(config, rank, world_size)
    join(worker, port)
    try:
        batches = [random_batch(VOCAB, seed, PARTS[world_size][rank]) for seed in range(2)]
        arrays = {f"grad/{n}": g for n, g in gradients(worker, batches[0]).items()}
        arrays |= {f"replay/{n}": g for n, g in gradients(worker, with_routes(batches[0], worker)).items()}
        metrics = worker.train_step([batches[1]], step=0)
        arrays |= {f"metric/{n}": np.array(v) for n, v in metrics.items() if not n.startswith("time/")}
        arrays |= {f"packed/{n}": w for n, w in packed_weights(worker, 3000).items()}
        everything = random_batch(VOCAB, 2)
        arrays["logprobs"] = worker.compute_logprobs(everything.token_ids, everything.lengths, 1.0)
        folder = base / f"{name}-{world_size}"
        worker.save_checkpoint(folder / "checkpoint")
        worker.export_hf(folder / "export")
        if rank == 0:
            write(folder, "result", arrays)
    finally:
        worker.shutdown()


def main(rank: int, ports: list[int], base: Path) -> None:
    model_module.ONE_UNIT_BYTES = 0  # layers are units of their own, as in large models
    for name in MODELS:
        run_layout(rank, ports.pop(), base, name, 2)
    run_divided(rank, ports.pop(), base)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with every model, and what one rank and two made of it."""
    folder = tmp_path_factory.mktemp("mixtures")
    for name, config in MODELS.items():
        save_model(folder / name, config, seed=5, bias_std=BIAS_STD)
        for world_size in PARTS:
            (folder / f"{name}-{world_size}").mkdir()
    run_script(__file__, folder)
    return folder


@pytest.fixture(scope="module")
def one(base: Path) -> dict[str, dict[str, np.ndarray]]:
    """By model: what one rank makes of it, in this process."""
    from tests.support.ports import free_port

    for name in MODELS:
        run_layout(0, free_port(), base, name, 1)
    return {name: read(base / f"{name}-1", "result") for name in MODELS}


@pytest.fixture
def start() -> Any:
    with one_at_a_time(policy) as starting:
        yield starting


def plain_gradients(folder: Path, batch: TrainBatch, coefficient: float) -> dict[str, np.ndarray]:
    """Of the default loss (PPO over tokens) and the load-balancing loss of transformers, by a loop over padded rows in one piece."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = np.cumsum(batch.lengths)
    rows = [slice(end - length, end) for end, length in zip(ends, batch.lengths, strict=True)]
    width = int(batch.lengths.max()) - 1
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        ids[i, : row.stop - row.start - 1] = torch.from_numpy(batch.token_ids[row].astype(np.int64))[:-1]
        mask[i, : row.stop - row.start - 1] = torch.from_numpy(batch.response_mask[row])[1:]
    chosen = watched_choices(model)
    output = model(input_ids=ids, output_router_logits=True)
    loss = torch.zeros(())
    for i, row in enumerate(rows):
        targets = torch.from_numpy(batch.token_ids[row].astype(np.int64))[1:]
        logprobs = torch.log_softmax(output.logits[i, : targets.numel()], -1).gather(1, targets[:, None])[:, 0]
        ratio = torch.exp(logprobs - torch.from_numpy(batch.behavior_logprobs[row])[1:])
        advantages = torch.from_numpy(batch.advantages[row])[1:]
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        terms = torch.where(advantages < 0, torch.minimum(terms, -3.0 * advantages), terms)  # dual clip
        loss = loss + (terms * mask[i, : targets.numel()]).sum() / batch.global_tokens
    config = model.config
    if config.model_type in BIASED_MODELS:
        balance = sigmoid_balance(output.router_logits, chosen, mask)
    else:
        balance = load_balancing_loss_func(output.router_logits, output.router_logits[0].shape[-1], config.num_experts_per_tok, mask)
    (loss + coefficient * balance).backward()
    return {n: p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}


def watched_choices(model: PreTrainedModel) -> list[torch.Tensor]:
    """Fills with the experts that each router of the next pass chooses, in order of the layers."""
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(lambda _, __, output: found.append(output[2]))
    return found


def sigmoid_balance(logits: Sequence[torch.Tensor], chosen: Sequence[torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """The same loss with normalized sigmoids as probabilities, over all layers together."""
    scores, kept = torch.cat(list(logits)).sigmoid(), mask.reshape(-1).bool().repeat(len(logits))
    shares, experts = (scores / scores.sum(1, keepdim=True))[kept], torch.cat(list(chosen))[kept]
    loads = torch.bincount(experts.reshape(-1), minlength=scores.shape[1]) / len(experts)
    return scores.shape[1] * torch.dot(loads, shares.mean(0))


@pytest.mark.parametrize("world_size", PARTS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_a_plain_transformers_loop(base: Path, one: dict[str, Any], name: str, world_size: int) -> None:
    found = read(base / f"{name}-{world_size}", "result", "grad/")
    expected = plain_gradients(base / name, random_batch(VOCAB, 0), coefficient=0.5)
    without = plain_gradients(base / name, random_batch(VOCAB, 0), coefficient=0.0)
    assert_gradients_equal(found, expected)
    assert max(np.abs(expected[n] - without[n]).max() for n in expected if n.endswith("mlp.gate.weight")) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_replayed_routes_give_the_same_gradients_on_any_number_of_ranks(base: Path, one: dict[str, Any], name: str) -> None:
    expected, own = (read(base / f"{name}-1", "result", key) for key in ("replay/", "grad/"))
    found = read(base / f"{name}-2", "result", "replay/")
    assert_gradients_equal(found, expected)
    assert max(np.abs(expected[n] - own[n]).max() for n in expected if n.endswith("mlp.gate.weight")) > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_metrics_and_logprobs_do_not_depend_on_the_number_of_ranks(base: Path, one: dict[str, Any], name: str) -> None:
    two = read(base / f"{name}-2", "result")
    for key, value in one[name].items():
        if key == "logprobs" or (key.startswith("metric/") and not key.endswith("micro_batches")):
            np.testing.assert_allclose(two[key], value, atol=1e-5, rtol=1e-5, err_msg=key)
    assert 1.0 < one[name]["metric/train/expert_load_max"] < 4.0


def test_divided_sequences_give_the_same_gradients_and_metrics(base: Path, one: dict[str, Any]) -> None:
    for prefix in ("grad/", "replay/"):
        assert_gradients_equal(read(base, "divided", prefix), read(base / "qwen3_moe-1", "result", prefix))
    metrics = read(base, "divided", "metric/")
    assert metrics
    for key, value in metrics.items():
        np.testing.assert_allclose(value, one["qwen3_moe"][f"metric/{key}"], atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("world_size", PARTS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_names_and_bytes_are_those_of_the_checkpoint(base: Path, one: dict[str, Any], name: str, world_size: int) -> None:
    folder = base / f"{name}-{world_size}"
    packed, original = read(folder, "result", "packed/"), load_file(base / name / "model.safetensors")
    assert {n: w.shape for n, w in packed.items()} == {n: tuple(w.shape) for n, w in original.items()}
    exported = load_file(folder / "export" / "model.safetensors")
    assert exported.keys() == packed.keys()
    for key, tensor in exported.items():
        assert np.array_equal(tensor.numpy(), packed[key]), key
    assert any(not np.array_equal(tensor.numpy(), packed[key]) for key, tensor in original.items() if ".experts." in key)
    loaded = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
    batch = random_batch(VOCAB, 2)
    with torch.no_grad():
        logits = loaded(input_ids=torch.from_numpy(batch.token_ids[: batch.lengths[0]].astype(np.int64))[None]).logits[0]
    scores = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(batch.token_ids[1 : batch.lengths[0]].astype(np.int64))[:, None])
    np.testing.assert_allclose(one[name]["logprobs"][1 : batch.lengths[0]], scores[:, 0].numpy(), atol=1e-4)


@pytest.mark.parametrize("world_size", PARTS)
def test_biases_move_against_the_load_of_a_plain_transformers_pass(base: Path, one: dict[str, Any], world_size: int) -> None:
    batch, packed = random_batch(VOCAB, 1), read(base / f"deepseek_v3-{world_size}", "result", "packed/")
    model = AutoModelForCausalLM.from_pretrained(base / "deepseek_v3", dtype=torch.float32)
    chosen, loads = watched_choices(model), torch.zeros(2, 9)
    ends = np.cumsum(batch.lengths)
    for end, length in zip(ends, batch.lengths, strict=True):
        own = slice(end - length, end)
        with torch.no_grad():
            model(input_ids=torch.from_numpy(batch.token_ids[own].astype(np.int64))[None, :-1])
        trained = torch.from_numpy(batch.response_mask[own][1:] > 0)
        loads += torch.stack([torch.bincount(experts[trained].reshape(-1), minlength=9) for experts in chosen])
        chosen.clear()
    names = [f"model.layers.{layer}.mlp.gate.e_score_correction_bias" for layer in (1, 2)]
    assert {name for name in packed if name.endswith("bias")} == set(names)
    for name, load in zip(names, loads, strict=True):
        expected = model.get_buffer(name) + BIAS_RATE * torch.sign(load.mean() - load)
        assert packed[name].dtype == np.float32
        np.testing.assert_allclose(packed[name], expected.numpy(), atol=1e-7, rtol=0)
    found = read(base / f"deepseek_v3-{world_size}", "result")["metric/train/layer_expert_load_max"]
    assert found == pytest.approx(float((loads.amax(1) / loads.mean(1)).mean()), rel=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_resumes_what_two_saved(base: Path, one: dict[str, Any], name: str, start: StartPolicy) -> None:
    worker = start(base / name)
    assert worker.load_checkpoint(base / f"{name}-2" / "checkpoint") == 1
    packed = read(base / f"{name}-2", "result", "packed/")
    for key, weight in packed_weights(worker).items():
        assert np.array_equal(weight, packed[key]), key


def test_recomputed_layers_in_one_piece_give_the_same_gradients(base: Path, start: StartPolicy) -> None:
    batch = random_batch(VOCAB, 0)
    options: list[dict[str, Any]] = [{"token_budget": 10_000}, {"token_budget": 24, "activation_checkpointing": True}]
    found = [gradients(start(base / "qwen3_moe", load_balancing=LoadBalancingConfig(), **extra), batch) for extra in options]
    assert_gradients_equal(found[1], found[0])


def test_adapters_are_on_the_attention_and_experts_stay(base: Path, start: StartPolicy) -> None:
    worker = start(base / "qwen3_moe", lora=LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "o_proj")))
    before = packed_weights(worker)
    for step in range(2):
        worker.train_step([random_batch(VOCAB, step)], step=step)
    changed = {key for key, weight in packed_weights(worker).items() if not np.array_equal(weight, before[key])}
    assert changed == {key for key in before if "q_proj" in key or "o_proj" in key}


if __name__ == "__main__":
    fork_ranks(2, NUM_PORTS, main)
