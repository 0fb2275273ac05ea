"""Real vLLM on CPU serves adapters beside the model's weights: what it answers is what transformers does with both added up."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from rljob_runtime.engine.protocol import ServedAdapters
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import Sampling
from rljob_runtime.weightsync.adapters import LORA_A, LORA_B
from tests.support.engine_contract import (
    TIMEOUT_S,
    TOLERANCE,
    config_for,
    drain,
    endless,
    expected_logprobs,
    expected_scores,
    generate,
    manifest_of,
    new_model,
    packed,
    request,
    save,
    wait_for_tokens,
)
from tests.support.records import tokens
from tests.support.vllm_engine import running

RANK = 3
"""Below the room for 8, so that it is padded."""
PROBE = (5, 17, 33, 8, 9, 10)
ALL = {StateKind.PARAMS, StateKind.KV_CACHE}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


def started(path: str, **settings: Any) -> Iterator[VllmEngine]:
    adapters = ServedAdapters(rank=RANK, slot_rank=8)
    config = replace(config_for(path), adapters=adapters, **settings)
    with running(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[VllmEngine, tuple[float, ...]]]:
    """An engine, and its scores of ``PROBE`` before any update."""
    for engine in started(save(base(), tmp_path_factory.mktemp("model")), release="discard"):
        yield engine, engine.score([PROBE], TIMEOUT_S)[0]


@pytest.fixture
def engine(fresh: tuple[VllmEngine, tuple[float, ...]]) -> VllmEngine:
    return fresh[0]


def base() -> Qwen2ForCausalLM:
    return new_model(tied=True, seed=0)


def adapters(seed: int, targets: tuple[str, ...] = TARGETS) -> Tensors:
    own = torch.Generator().manual_seed(seed)
    found: Tensors = {}
    for name, module in base().named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in targets:
            found[name + LORA_A] = torch.randn(RANK, module.in_features, generator=own) / 4
            found[name + LORA_B] = torch.randn(module.out_features, RANK, generator=own) / 4
    return found


def merged(tensors: Tensors) -> Qwen2ForCausalLM:
    model = copy.deepcopy(base())
    with torch.no_grad():
        for name, module in model.named_modules():
            if name + LORA_A in tensors:
                module.weight += tensors[name + LORA_B] @ tensors[name + LORA_A]
    return model


def push(engine: VllmEngine, tensors: Tensors, version: int, on_running: Any = "recompute") -> None:
    manifest = manifest_of(tensors, 5_000)
    assert len(manifest.buckets) > 1
    engine.begin_update(manifest, version)
    for bucket in reversed(manifest.buckets):
        engine.load_bucket(bucket.index, packed(bucket, tensors))
    assert engine.finish_update(TIMEOUT_S, on_running) == version


def held(worker: Any) -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Both stacks of every adapted layer, in the engine's process."""
    modules = worker.model_runner.get_model().lora_manager.modules
    return {name: ([a[0, 0] for a in m.lora_a_stacked], [b[0, 0] for b in m.lora_b_stacked]) for name, m in modules.items()}


def assert_scores(engine: VllmEngine, model: Qwen2ForCausalLM) -> None:
    for probe in (PROBE, tuple(range(1, 59)) * 6):
        assert engine.score([probe], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, probe), abs=TOLERANCE)


def test_until_the_first_update_the_model_alone_answers(fresh: tuple[VllmEngine, tuple[float, ...]]) -> None:
    assert fresh[1] == pytest.approx(expected_scores(base(), PROBE), abs=TOLERANCE)


def test_after_every_update_scores_and_samples_are_those_of_the_merged_weights(engine: VllmEngine) -> None:
    for seed in (1, 2):
        tensors = adapters(seed)
        push(engine, tensors, engine.version() + 1)
        model = merged(tensors)
        assert_scores(engine, model)
        found = generate(engine, [request("r", Sampling(max_tokens=12))])["r"]
        expected = expected_logprobs(model, (5, 17, 33, 8), Sampling(max_tokens=12), tokens(found))
        assert found.segment.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert found.segment.version_spans[0].version == engine.version()


def test_every_tensor_is_the_one_that_was_sent_to_the_bit(engine: VllmEngine) -> None:
    tensors = adapters(3)
    push(engine, tensors, engine.version() + 1)
    assert engine.loop is not None
    (stacks,) = engine.loop.core.collective_rpc(held)
    packs = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    compared = 0
    for name, (stacked_a, stacked_b) in stacks.items():
        owner, _, last = name.rpartition(".")
        for part, a, b in zip(packs.get(last, [last]), stacked_a, stacked_b, strict=True):
            assert torch.equal(a[:RANK], tensors[f"{owner}.{part}{LORA_A}"])
            assert torch.equal(b[:, :RANK], tensors[f"{owner}.{part}{LORA_B}"])
            assert not a[RANK:].any()
            assert not b[:, RANK:].any()
            compared += 2
    assert compared == len(tensors)


def test_layers_that_an_update_leaves_out_are_the_models_own_again(engine: VllmEngine) -> None:
    push(engine, adapters(4), engine.version() + 1)
    some = adapters(5, ("q_proj", "v_proj", "down_proj"))
    push(engine, some, engine.version() + 1)
    assert_scores(engine, merged(some))


def test_keep_goes_on_with_old_keys_and_new_requests_do_not_see_them(engine: VllmEngine) -> None:
    shared = tuple(range(3, 59)) * 5  # more than one cache block
    push(engine, adapters(6), engine.version() + 1)
    generate(engine, [request("warm", Sampling(max_tokens=1), 0, shared)])
    engine.submit([endless(f"r{i}", i) for i in range(4)])
    wait_for_tokens(engine, 10)
    new = adapters(7)
    push(engine, new, engine.version() + 1, "keep")
    engine.submit([request("fresh", Sampling(max_tokens=4), 1, shared)])
    found = drain(engine, 5)
    assert any(len(completion.segment.version_spans) == 2 for completion in found.values())
    expected = expected_logprobs(merged(new), shared, Sampling(max_tokens=4), tokens(found["fresh"]))
    assert found["fresh"].segment.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_an_update_of_other_layers_or_ranks_or_of_weights_is_refused_and_the_old_one_served(engine: VllmEngine) -> None:
    old = adapters(8)
    push(engine, old, engine.version() + 1)
    version = engine.version()
    for wrong, said in (
        ({"model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(RANK, 64)}, "not in the engine's model"),
        ({name: t[:1] if name.endswith(LORA_A) else t for name, t in old.items()}, "other shapes"),
        ({name: t for name, t in old.items() if name.endswith(LORA_A)}, "missing"),
        (dict(base().named_parameters()), "not in the engine's model: lm_head.weight|not in the engine's model: model"),
    ):
        with pytest.raises(WeightSyncError, match=said):
            engine.begin_update(manifest_of({name: t.detach() for name, t in wrong.items()}), version + 1)
    assert engine.version() == version
    assert_scores(engine, merged(old))


def test_after_its_memory_was_away_it_reads_the_model_again_and_gets_the_newest_adapters(engine: VllmEngine) -> None:
    push(engine, adapters(9), engine.version() + 1)
    engine.offload({StateKind.KV_CACHE}, TIMEOUT_S)
    engine.load({StateKind.KV_CACHE}, TIMEOUT_S)
    assert_scores(engine, merged(adapters(9)))  # the cache alone takes nothing with it
    for seed in (10, 11):
        engine.offload(ALL, TIMEOUT_S)
        engine.load({StateKind.PARAMS}, TIMEOUT_S)
        push(engine, adapters(seed), engine.version() + 1)
        engine.load({StateKind.KV_CACHE}, TIMEOUT_S)
        assert_scores(engine, merged(adapters(seed)))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_shards")
def test_tensor_parallel_ranks_take_their_parts(tmp_path: Path) -> None:
    for engine in started(save(base(), tmp_path), tensor_parallel_size=2):
        push(engine, adapters(12), 1)
        assert_scores(engine, merged(adapters(12)))
