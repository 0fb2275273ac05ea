"""Mixtures of experts from the trainer into real vLLM on CPU: after an update its log-probs and its routes are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.records import GenerationRequest, Sampling, WeightManifest
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets
from tests.integration.rank_processes import random_batch
from tests.integration.test_mixture_ranks import watched_choices
from tests.support.engine_contract import TIMEOUT_S, TOLERANCE, config_for, drain, expected_scores
from tests.support.records import ids
from tests.support.trainers import one_at_a_time, policy, save_model
from tests.support.vllm_engine import running

VOCAB = 60
SMALL: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": 1024, "initializer_range": 0.2},
}
MODELS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, intermediate_size=96, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, head_dim=32, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SMALL, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 2, "intermediate_size": 96, "moe_intermediate_size": 64, "first_k_dense_replace": 1},
        **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2, "n_shared_experts": 1},
        **{"q_lora_rank": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
}
"""Latent attention of 512 + 64 numbers is all that vLLM's kernel for CPU computes."""
PROBES = [(5, 17, 33, 8, 9, 10), (4, 4), tuple(range(1, 59)) * 3]


def updates(folder: Path, rate: float) -> tuple[WeightManifest, list[list[np.ndarray]]]:
    """Buckets after one training step and after two, and exports of both; before the engine, which has a process group of its own."""
    made = []
    with one_at_a_time(policy) as start:
        worker: PolicyWorker = start(folder, router_bias_update_rate=rate)
        manifest = plan_buckets(worker.weight_specs(), 50_000)  # layers are larger than a bucket
        assert len(manifest.buckets) > 4
        for version in (1, 2):
            worker.train_step([random_batch(VOCAB, version)], step=version)
            packed = [worker.pack_buckets({0: bucket}) for bucket in manifest.buckets]
            made.append([data for data in packed if data is not None])
            worker.export_hf(folder / f"v{version}")
    return manifest, made


def test_engines_have_the_trainers_weights_after_every_update(tmp_path: Path) -> None:
    """The second update reloads layers that were reloaded."""
    for name, config in MODELS.items():
        folder = save_model(tmp_path / name, config, seed=3, bias_std=0.2)
        manifest, made = updates(folder, rate=0.05 if name == "deepseek_v3" else 0.0)
        plain = [AutoModelForCausalLM.from_pretrained(folder / f"v{v}", dtype=torch.float32).eval() for v in (1, 2)]
        with running(replace(config_for(str(folder)), returns_routes=True)) as engine:
            for version, buckets in enumerate(made, start=1):
                before = engine.score(PROBES, TIMEOUT_S)
                engine.begin_update(manifest, version)
                for index in reversed(range(len(buckets))):
                    engine.load_bucket(index, buckets[index])
                assert engine.finish_update(TIMEOUT_S) == version
                for probe, old, new in zip(PROBES, before, engine.score(PROBES, TIMEOUT_S), strict=True):
                    assert new == pytest.approx(expected_scores(plain[version - 1], probe), abs=TOLERANCE)
                    assert np.abs(np.array(old) - np.array(new)).max() > 0.01
                check_routes(engine, plain[version - 1], version)


def check_routes(engine: VllmEngine, model: PreTrainedModel, version: int) -> None:
    """Those of every token but the last, and of none that is known already."""
    sampling = Sampling(max_tokens=9, returns_routes=True)
    prompts = {f"{version}/{known}": ids(5, 17, 33, *range(known)) for known in range(4)}
    requests = [
        GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, seed=known, num_routed_before=known)
        for known, (name, prompt) in enumerate(prompts.items())
    ]
    engine.submit(requests)
    found, routers = drain(engine, len(requests)), watched_choices(model)
    for request in requests:
        segment, known = found[request.request_id].segment, request.num_routed_before
        tokens = np.concatenate([request.prompt_token_ids, segment.token_ids]).astype(np.int64)
        routers.clear()
        with torch.no_grad():
            model(input_ids=torch.from_numpy(tokens)[None])
        chosen = np.stack([experts[known:-1].sort().values.numpy() for experts in routers], axis=1)
        assert segment.routes is not None
        np.testing.assert_array_equal(np.sort(segment.routes[:, -len(routers) :]), chosen)
