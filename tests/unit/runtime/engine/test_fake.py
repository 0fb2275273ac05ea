"""The fake engine keeps the promises the driver's tests build on."""

from __future__ import annotations

import numpy as np
import pytest

from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.engine.protocol import Engine
from rljob_runtime.errors import DataError, DeadlineError, EngineDiedError, WeightSyncError
from rljob_runtime.packed import unpack
from rljob_runtime.records import GenerationRequest, Sampling, VersionSpan, WeightManifest
from rljob_runtime.weightsync.packing import plan_buckets
from tests.support.records import collected, ids

MANIFEST: WeightManifest = plan_buckets([("a.weight", "float32", (4,)), ("b.weight", "float32", (32,))], 64)


def requests(count: int, max_tokens: int = 8) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"r{i}", prompt_token_ids=ids(1, 2), sampling=Sampling(max_tokens=max_tokens), seed=i)
        for i in range(count)
    ]


def push(engine: Engine, version: int) -> int:
    engine.begin_update(MANIFEST, version)
    for bucket in MANIFEST.buckets:
        engine.load_bucket(bucket.index, np.zeros(bucket.size_bytes, dtype=np.uint8))
    return engine.finish_update(1.0)


def test_every_request_comes_back_once_and_runs_agree() -> None:
    runs = []
    for _ in range(2):
        engine = FakeEngine(max_num_seqs=5)
        engine.submit(requests(20))
        found = []
        while engine.running_ids() or not found:
            found += collected(engine, 1.0)
        assert sorted(completion.request_id for completion in found) == sorted(f"r{i}" for i in range(20))
        assert engine.stats()["generated_tokens"] == sum(len(completion.segment) for completion in found)
        runs.append(found)
    assert runs[0] == runs[1]


def test_the_test_chooses_the_order_and_versions_are_spans() -> None:
    engine = FakeEngine(automatic=False, length_of=lambda request: 6)
    engine.submit(requests(3))
    engine.advance(2)
    assert push(engine, 7) == 7
    engine.end(["r2", "r0"])
    first = collected(engine, 10.0)
    assert [completion.request_id for completion in first] == ["r2", "r0"]
    assert first[0].segment.version_spans == (VersionSpan(start=0, end=2, version=0), VersionSpan(start=2, end=6, version=7))
    assert collected(engine, 10.0) == []
    engine.abort(["r1", "r9"])
    (aborted,) = collected(engine, 0.0)
    assert (aborted.finish_reason, len(aborted.segment)) == ("abort", 2)


def test_a_slow_engine_returns_nothing_in_time() -> None:
    engine = FakeEngine(step_s=10.0, length_of=lambda request: 2)
    engine.submit(requests(1))
    assert collected(engine, 5.0) == []
    assert engine.now_s == 5.0
    assert len(collected(engine, 20.0)) == 1
    with pytest.raises(DeadlineError, match="scoring"):
        engine.score([(1, 2)], 1.0)


def test_a_whole_update_in_one_call_is_checked_like_its_parts() -> None:
    engine = FakeEngine()
    parts = [np.zeros(bucket.size_bytes, dtype=np.uint8) for bucket in MANIFEST.buckets]
    assert engine.update(MANIFEST, 3, 1.0, "recompute", *parts) == engine.version() == 3
    with pytest.raises(WeightSyncError, match=r"1 of 2 buckets never arrived"):
        engine.update(MANIFEST, 4, 1.0, "recompute", *parts[:1])
    assert engine.version() == 3


def test_faults_are_those_of_a_real_engine() -> None:
    engine = FakeEngine(expected={"a.weight": (4,), "b.weight": (32,)})
    with pytest.raises(WeightSyncError, match=r"missing b\.weight"):
        engine.begin_update(plan_buckets([("a.weight", "float32", (4,))], 64), 1)
    with pytest.raises(WeightSyncError, match="no update is open"):
        engine.finish_update(1.0)
    engine.lose_tensor("b.weight")
    with pytest.raises(WeightSyncError, match=r"no data for b\.weight"):
        push(engine, 1)
    assert engine.version() == 0
    assert push(engine, 1) == 1
    engine.submit(requests(1))
    with pytest.raises(DataError, match="in use"):
        engine.submit(requests(1))
    engine.die("pulled the plug")
    with pytest.raises(EngineDiedError, match="pulled the plug"):
        collected(engine, 1.0)


def test_scores_tell_versions_apart() -> None:
    engine, other = FakeEngine(), FakeEngine()
    before = engine.score([(1, 2, 3)], 1.0)
    assert before == other.score([(1, 2, 3)], 1.0)
    push(engine, 1)
    assert engine.score([(1, 2, 3)], 1.0) != before


def test_a_cleared_engine_takes_the_same_requests_again() -> None:
    engine = FakeEngine(automatic=False)
    engine.submit(requests(3))
    engine.end(["r1"])
    engine.clear(1.0)
    engine.submit(requests(3))
    assert len(unpack(engine.salvage())) == 3


def test_a_dead_engine_still_gives_back_what_it_has() -> None:
    engine = FakeEngine(automatic=False)
    engine.submit(requests(3))
    engine.end(["r1"])
    engine.advance(1)
    engine.die("pulled the plug")
    left = {completion.request_id: completion for completion in unpack(engine.salvage())}
    assert left["r1"].finish_reason in ("stop", "length")
    unfinished = [completion for completion in left.values() if completion.finish_reason == "abort"]
    assert len(left) == 3
    assert all(len(completion.segment) == len(completion.segment.logprobs) == 1 for completion in unfinished)
    assert unpack(engine.salvage()) == []
