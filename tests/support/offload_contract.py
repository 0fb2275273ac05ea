"""What every engine that gives its memory back does, asked of a real one.

A test module of an engine derives :class:`OffloadContract` and has a fixture ``engine``: the untied model of seed 0, served under a
version of its own, all of it on the device, started with ``release='discard'`` and a cache of ``CACHE_BYTES``. Answers are compared
greedily: not every engine obeys seeds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rljob_runtime.engine.protocol import Engine, EngineResidenceError
from rljob_runtime.errors import DeadlineError, WeightSyncError
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.records import GenerationRequest, Sampling, VersionSpan
from tests.support.engine_contract import (
    LONG,
    TIMEOUT_S,
    TOLERANCE,
    drain,
    endless,
    expected_scores,
    generate,
    manifest_of,
    new_model,
    packed,
    push,
    request,
    wait_for_tokens,
    weights,
)
from tests.support.records import collected, tokens

PARAMS, CACHE = StateKind.PARAMS, StateKind.KV_CACHE
BOTH = frozenset({PARAMS, CACHE})
CACHE_BYTES = 32 << 20
GREEDY = replace(LONG, temperature=0.0)


def greedy(engine: Engine) -> list[tuple[int, ...]]:
    """What some requests are answered, half of them with a prompt longer than a block of the cache."""
    asked = [request(f"g{i}", replace(GREEDY, max_tokens=20), prompt=(5, 17, 33 + i) * (1 + 50 * (i % 2))) for i in range(4)]
    found = generate(engine, asked)
    return [tokens(found[r.request_id]) for r in asked]


def long(name: str, first: int) -> GenerationRequest:
    return request(name, GREEDY, prompt=(first, 17, 33, 8))


class OffloadContract:
    """Tests of one engine."""

    def test_cycles_free_the_memory_and_change_no_answer(self, engine: Engine) -> None:
        model = new_model(tied=False, seed=3)
        push(engine, model, engine.version() + 1)
        expected = greedy(engine)
        full_bytes = engine.memory().allocated_bytes
        weight_bytes = sum(tensor.nbytes for tensor in weights(model).values())
        for _ in range(3):
            off = engine.offload(BOTH, TIMEOUT_S)
            assert off.freed_bytes.keys() == BOTH
            assert off.freed_bytes[PARAMS] >= weight_bytes  # more where weights are there twice, plain and packed
            assert off.freed_bytes[CACHE] > 0.9 * CACHE_BYTES
            assert off.before.allocated_bytes - off.after.allocated_bytes == sum(off.freed_bytes.values())
            assert off.after.allocated_bytes < 0.05 * full_bytes
            assert off.copied_bytes == {}
            assert off.before.host_rss_bytes - off.after.host_rss_bytes > 0.8 * CACHE_BYTES  # really gone from the process
            on = engine.load({PARAMS}, TIMEOUT_S)
            assert on.undefined == {PARAMS}
            assert on.freed_bytes[PARAMS] > 0
            push(engine, model, engine.version() + 1)
            assert engine.load({CACHE}, TIMEOUT_S).undefined == frozenset()
            assert engine.memory().allocated_bytes == full_bytes
            assert greedy(engine) == expected

    def test_while_away_requests_wait_and_nothing_is_written(self, engine: Engine) -> None:
        version = engine.version()
        engine.offload(BOTH, TIMEOUT_S)
        assert engine.residence() == dict.fromkeys(BOTH, Residence.OFFLOADED)
        assert engine.offload(BOTH, TIMEOUT_S).freed_bytes == {}
        engine.submit([request("waits", Sampling(max_tokens=2)), request("leaves", Sampling(max_tokens=2))])
        engine.abort(["leaves"])
        assert drain(engine, 1)["leaves"].finish_reason == "abort"
        assert collected(engine, 0.2) == []
        assert (engine.version(), engine.stats()["waiting"]) == (version, 1)
        with pytest.raises(EngineResidenceError, match="score: the engine's kv_cache, params are not on the device; load them first"):
            engine.score([(1, 2)], TIMEOUT_S)
        # Bytes may come before the memory they go to, but go nowhere.
        model, tensors = new_model(tied=False, seed=4), weights(new_model(tied=False, seed=4))
        manifest = manifest_of(tensors)
        engine.begin_update(manifest, version + 1)
        for bucket in manifest.buckets:
            engine.load_bucket(bucket.index, packed(bucket, tensors))
        with pytest.raises(WeightSyncError, match="the engine's weights are offloaded; load params, then finish the update again"):
            engine.finish_update(TIMEOUT_S)
        engine.load({PARAMS}, TIMEOUT_S)
        assert collected(engine, 0.2) == []
        assert engine.finish_update(TIMEOUT_S) == version + 1
        assert collected(engine, 0.2) == []
        engine.load({CACHE}, TIMEOUT_S)
        assert drain(engine, 1)["waits"].segment.version_spans == (VersionSpan(start=0, end=2, version=version + 1),)
        assert engine.score([(5, 6, 7)], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, (5, 6, 7)), abs=TOLERANCE)

    def test_a_loaded_engine_answers_nothing_until_a_full_update(self, engine: Engine) -> None:
        expected = greedy(engine)
        engine.offload(BOTH, TIMEOUT_S)
        engine.load(BOTH, TIMEOUT_S)
        engine.submit([request("waits", Sampling(max_tokens=2))])
        for ask in (lambda: collected(engine, TIMEOUT_S), lambda: engine.score([(1, 2)], TIMEOUT_S)):
            with pytest.raises(WeightSyncError, match="its weights were discarded by an offload and no full update came since"):
                ask()
        push(engine, new_model(tied=False, seed=0), engine.version() + 1)
        assert drain(engine, 1).keys() == {"waits"}
        assert greedy(engine) == expected

    def test_running_responses_refuse_abort_or_go_on_as_they_would_have(self, engine: Engine) -> None:
        names = [f"r{i}" for i in range(3)]
        whole = generate(engine, [long(name, 5 + i) for i, name in enumerate(names)])
        engine.submit([long(name, 5 + i) for i, name in enumerate(names)])
        wait_for_tokens(engine, 30)
        with pytest.raises(EngineResidenceError, match="3 responses are running"):
            engine.offload(BOTH, TIMEOUT_S)
        engine.offload(BOTH, TIMEOUT_S, "keep")
        engine.load({PARAMS}, TIMEOUT_S)
        push(engine, new_model(tied=False, seed=0), engine.version() + 1)
        engine.load({CACHE}, TIMEOUT_S)
        for name, kept in drain(engine, 3).items():
            assert tokens(kept) == tokens(whole[name])
            assert kept.segment.logprobs == pytest.approx(whole[name].segment.logprobs, abs=TOLERANCE)
            assert len(kept.segment.version_spans) == 2
        engine.submit([long("cut", 6)])
        wait_for_tokens(engine, 10)
        engine.offload({CACHE}, TIMEOUT_S, "abort")
        cut = drain(engine, 1)["cut"]
        assert (cut.finish_reason, tokens(cut)) == ("abort", tokens(whole["r1"])[: len(tokens(cut))])
        engine.load({CACHE}, TIMEOUT_S)
        assert tokens(generate(engine, [long("r2", 7)])["r2"]) == tokens(whole["r2"])  # the weights had stayed

    def test_the_cache_alone_comes_back_empty_and_nothing_is_looked_up_in_it(self, engine: Engine) -> None:
        expected = greedy(engine)  # prompts with equal beginnings longer than a block
        off = engine.offload({CACHE}, TIMEOUT_S)
        assert off.freed_bytes.keys() == {CACHE}
        assert off.after.allocated_bytes > 0
        assert engine.load({CACHE}, TIMEOUT_S).undefined == frozenset()
        assert greedy(engine) == expected

    def test_a_deadline_that_passed_changes_nothing(self, engine: Engine) -> None:
        with pytest.raises(DeadlineError, match="offload"):
            engine.offload(BOTH, -1.0)
        assert set(engine.residence().values()) == {Residence.ON_DEVICE}
        assert generate(engine, [request("later", Sampling(max_tokens=2))]).keys() == {"later"}

    def test_weights_do_not_leave_before_the_cache(self, engine: Engine) -> None:
        engine.submit([endless("runs")])
        with pytest.raises(EngineResidenceError, match="offload both, or kv_cache first"):
            engine.offload({PARAMS}, TIMEOUT_S)
        engine.abort(["runs"])
        drain(engine, 1)
