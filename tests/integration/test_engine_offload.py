"""Real vLLM on CPU gives its memory back and takes it again, and answers afterwards as if nothing had happened."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rljob_runtime.engine.protocol import EngineResidenceError
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.errors import EngineDiedError, ModelError, WeightSyncError
from rljob_runtime.records import Sampling
from tests.support.engine_contract import (
    TIMEOUT_S,
    config_for,
    drain,
    endless,
    generate,
    manifest_of,
    new_model,
    packed,
    push,
    request,
    save,
    wait_for_tokens,
    weights,
)
from tests.support.offload_contract import BOTH, CACHE, CACHE_BYTES, PARAMS, OffloadContract
from tests.support.records import collected, tokens
from tests.support.vllm_engine import running

MIB = 1 << 20


def started(path: str) -> Iterator[VllmEngine]:
    config = replace(config_for(path), release="discard", kv_cache_bytes=CACHE_BYTES)
    with running(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    yield from started(save(new_model(tied=False, seed=0), tmp_path_factory.mktemp("untied")))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    yield from started(save(new_model(tied=True, seed=0), tmp_path_factory.mktemp("tied")))


@pytest.fixture
def engine(untied: VllmEngine) -> VllmEngine:
    """The untied engine, all of it on the device, with known weights under a version of its own."""
    untied.load(BOTH, TIMEOUT_S)
    push(untied, new_model(tied=False, seed=0), untied.version() + 1)
    return untied


def worker_of(engine: VllmEngine) -> Any:
    """vLLM's only worker; look at it while the engine computes nothing."""
    assert engine.loop is not None
    return engine.loop.core.engine_core.model_executor.driver_worker.worker


def seeded(engine: VllmEngine) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """What eight seeded requests are answered, half of them with a prompt longer than a block of the cache."""
    asked = [request(f"r{seed}", Sampling(max_tokens=20), seed, (5, 17, 33) * (1 + 50 * (seed % 2))) for seed in range(8)]
    found = generate(engine, asked)
    return [(tokens(found[r.request_id]), found[r.request_id].segment.logprobs.tolist()) for r in asked]


class TestVllmOffload(OffloadContract):
    """The contract of all engines that give their memory back."""


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_five_cycles_free_the_memory_and_change_no_answer(kind: str, request: pytest.FixtureRequest) -> None:
    engine: VllmEngine = request.getfixturevalue(kind)
    model = new_model(tied=kind == "tied", seed=3)
    engine.load(BOTH, TIMEOUT_S)
    push(engine, model, engine.version() + 1)
    expected = seeded(engine)
    full_bytes = engine.memory().allocated_bytes
    weight_bytes = sum(tensor.nbytes for tensor in weights(model).values())
    rss_bytes = []
    for _ in range(5):
        off = engine.offload(BOTH, TIMEOUT_S)
        assert off.freed_bytes.keys() == BOTH
        assert off.freed_bytes[PARAMS] >= weight_bytes  # more where weights are there twice, plain and packed
        assert sum(off.freed_bytes.values()) == off.before.allocated_bytes == full_bytes
        assert (off.copied_bytes, off.after.allocated_bytes, off.after.peak_bytes) == ({}, 0, full_bytes)
        assert off.before.host_rss_bytes - off.after.host_rss_bytes > 0.9 * CACHE_BYTES  # really gone from the process
        rss_bytes.append(off.after.host_rss_bytes)
        on = engine.load({PARAMS}, TIMEOUT_S)
        assert on.undefined == {PARAMS}
        assert on.freed_bytes[PARAMS] == on.after.allocated_bytes > 0
        push(engine, model, engine.version() + 1)
        assert engine.load({CACHE}, TIMEOUT_S).undefined == frozenset()
        assert engine.memory().allocated_bytes == full_bytes
        assert seeded(engine) == expected
    assert max(rss_bytes[1:]) - rss_bytes[0] < 8 * MIB


def test_storages_packed_copies_and_cache_are_gone_while_away(engine: VllmEngine) -> None:
    worker = worker_of(engine)
    model = worker.model_runner.model
    handlers = [
        weakref.ref(cell.cell_contents)
        for layer in model.modules()
        for cell in getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ()
        if not isinstance(cell.cell_contents, int)
    ]
    caches = [weakref.ref(tensor) for tensor in worker.model_runner.kv_caches]
    attention = list(worker.model_runner.compilation_config.static_forward_context.values())
    sizes = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
    assert len(handlers) >= 9
    assert len(caches) == 2
    assert sum(sizes) > 0
    engine.offload(BOTH, TIMEOUT_S)
    gc.collect()
    assert [ref() for ref in handlers + caches] == [None] * (len(handlers) + 2)
    assert sum(parameter.untyped_storage().nbytes() for parameter in model.parameters()) == 0
    assert [layer.kv_cache.numel() for layer in attention] == [0, 0]
    with pytest.raises(RuntimeError, match="this layer's weights were offloaded"):
        next(layer for layer in model.modules() if hasattr(layer, "cpu_linear")).cpu_linear(torch.zeros(1, 64), None, None)
    engine.load(BOTH, TIMEOUT_S)
    assert [parameter.untyped_storage().nbytes() for parameter in model.parameters()] == sizes
    assert all(layer.kv_cache.any().item() is False for layer in attention)


def test_a_loaded_engine_refuses_to_answer_until_a_full_update_succeeds(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    expected = seeded(engine)
    engine.offload(BOTH, TIMEOUT_S)
    engine.load(BOTH, TIMEOUT_S)
    engine.submit([request("waits", Sampling(max_tokens=2))])
    for ask in (lambda: collected(engine, TIMEOUT_S), lambda: engine.score([(1, 2)], TIMEOUT_S)):
        with pytest.raises(WeightSyncError, match="its weights were discarded by an offload and no full update came since"):
            ask()
    receive, calls = BucketReceiver.receive_weights, []

    def fail_on_third(self: BucketReceiver, update: Any) -> None:
        calls.append(update)
        if len(calls) == 3:
            raise ValueError("broken bucket")
        receive(self, update)

    monkeypatch.setattr(BucketReceiver, "receive_weights", fail_on_third)
    tensors = weights(new_model(tied=False, seed=1))
    manifest = manifest_of(tensors, 9_000)  # small buckets, so that layers are left half loaded
    engine.begin_update(manifest, 900)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, packed(bucket, tensors))
    with pytest.raises(WeightSyncError, match="broken bucket"):
        engine.finish_update(TIMEOUT_S)
    for _ in range(2):  # as it is, and after the half-loaded weights went away and came back
        with pytest.raises(WeightSyncError, match=r"no full update came since|version 900 broke off"):
            collected(engine, TIMEOUT_S)
        assert engine.offload(BOTH, TIMEOUT_S).after.allocated_bytes == 0
        engine.load(BOTH, TIMEOUT_S)
    push(engine, new_model(tied=False, seed=0), 901)
    assert drain(engine, 1).keys() == {"waits"}
    assert seeded(engine) == expected


def test_running_responses_refuse_abort_or_go_on_as_they_would_have(engine: VllmEngine) -> None:
    whole = generate(engine, [endless(f"r{seed}", seed) for seed in range(3)])
    engine.submit([endless(f"r{seed}", seed) for seed in range(3)])
    wait_for_tokens(engine, 30)
    with pytest.raises(EngineResidenceError, match="3 responses are running"):
        engine.offload(BOTH, TIMEOUT_S)
    engine.offload(BOTH, TIMEOUT_S, "keep")
    assert engine.stats()["running"] == 0
    engine.load({PARAMS}, TIMEOUT_S)
    push(engine, new_model(tied=False, seed=0), engine.version() + 1)
    engine.load({CACHE}, TIMEOUT_S)
    for name, kept in drain(engine, 3).items():
        assert tokens(kept) == tokens(whole[name])
        assert kept.segment.logprobs == pytest.approx(whole[name].segment.logprobs, abs=1e-4)
        assert len(kept.segment.version_spans) == 2
    engine.submit([endless("cut", 1)])
    wait_for_tokens(engine, 10)
    engine.offload({CACHE}, TIMEOUT_S, "abort")
    cut = drain(engine, 1)["cut"]
    assert (cut.finish_reason, tokens(cut)) == ("abort", tokens(whole["r1"])[: len(tokens(cut))])
    engine.load({CACHE}, TIMEOUT_S)
    again = generate(engine, [endless("r2", 2)])["r2"]
    assert tokens(again) == tokens(whole["r2"])  # the cache alone went and came; the weights had stayed


def test_weights_cannot_be_kept_on_a_cpu(engine: VllmEngine, tmp_path: Path) -> None:
    config = replace(config_for(save(new_model(tied=False, seed=0), tmp_path)), release="copy")
    with pytest.raises(ModelError, match="release 'copy' needs vLLM's sleep mode, which CPU does not have"):
        VllmEngine(config)


def test_a_load_that_breaks_off_ends_the_engine(tied: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last of the module: the tied engine is dead afterwards."""
    from rljob_runtime.engine.vllm import memory

    def no_room(worker: Any) -> int:
        raise MemoryError("no room")

    tied.offload(BOTH, TIMEOUT_S)
    tied.submit([endless("never", 0)])
    monkeypatch.setattr(memory, "restore_cache", no_room)
    for call in (lambda: tied.load(BOTH, TIMEOUT_S), lambda: collected(tied, TIMEOUT_S), lambda: tied.score([(1, 2)], TIMEOUT_S)):
        with pytest.raises(EngineDiedError, match=r"load of kv_cache, params broke off half-way: MemoryError: no room.*start a new engine"):
            call()
