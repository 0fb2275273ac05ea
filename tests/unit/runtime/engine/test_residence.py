"""An engine's memory leaves and comes back: what is allowed when, in which words, and what the fake engine answers meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.engine.fake import FakeEngine, FakeMemory
from rljob_runtime.engine.protocol import Engine, EngineResidenceError, OnOffload
from rljob_runtime.engine.residence import ENGINE_KINDS, EngineResidence, check_running
from rljob_runtime.errors import DeadlineError, EngineDiedError, WeightSyncError
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.records import GenerationRequest, Sampling, WeightManifest
from rljob_runtime.weightsync.packing import plan_buckets
from tests.support.records import collected, ids

MANIFEST: WeightManifest = plan_buckets([("a.weight", "float32", (4,)), ("b.weight", "float32", (32,))], 64)
PARAMS, CACHE = StateKind.PARAMS, StateKind.KV_CACHE
BOTH = {PARAMS, CACHE}
ON_RUNNING: dict[str, OnOffload] = {"offload": "refuse", "keep": "keep", "abort": "abort"}


def requests(*names: str, max_tokens: int = 6) -> list[GenerationRequest]:
    sampling = Sampling(max_tokens=max_tokens)
    return [GenerationRequest(request_id=name, prompt_token_ids=ids(1, 2), sampling=sampling, seed=i) for i, name in enumerate(names)]


def open_update(engine: Engine, version: int) -> None:
    engine.begin_update(MANIFEST, version)
    for bucket in MANIFEST.buckets:
        engine.load_bucket(bucket.index, np.zeros(bucket.size_bytes, dtype=np.uint8))


def push(engine: Engine, version: int) -> None:
    open_update(engine, version)
    assert engine.finish_update(1.0) == version


def never_ending() -> FakeEngine:
    return FakeEngine(automatic=False, length_of=lambda request: 6)


# -- the state machine ------------------------------------------------------------------------------------------------------------


def move(residence: EngineResidence, kinds: frozenset[StateKind], to: Residence) -> None:
    with residence.moving(kinds, to):
        assert residence.away() >= kinds


def test_kinds_pass_through_the_states_in_between() -> None:
    residence = EngineResidence()
    seen = []
    with residence.moving(residence.to_offload(BOTH), Residence.OFFLOADED):
        seen.append(residence.states())
    seen.append(residence.states())
    with residence.moving(residence.to_load({PARAMS}), Residence.ON_DEVICE):
        seen.append(residence.states())
    seen.append(residence.states())
    assert [(states[PARAMS], states[CACHE]) for states in seen] == [
        (Residence.OFFLOADING, Residence.OFFLOADING),
        (Residence.OFFLOADED, Residence.OFFLOADED),
        (Residence.LOADING, Residence.OFFLOADED),
        (Residence.ON_DEVICE, Residence.OFFLOADED),
    ]
    assert residence.away() == {CACHE}


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda here: here.to_offload({StateKind.GRADS, StateKind.OTHER, PARAMS}),
            "offload of grads, other: an engine has only kv_cache, params",
        ),
        (lambda here: here.to_load({StateKind.OPTIMIZER}), "load of optimizer: an engine has only kv_cache, params; ask for those"),
        (lambda here: here.to_offload({PARAMS}), "the kv_cache of absent weights serves nobody; offload both, or kv_cache first"),
        (
            lambda here: EngineResidence(releasable=False).to_offload(BOTH),
            "offload of kv_cache, params: the engine was started with release='never'; start it with EngineConfig.release 'discard' or",
        ),
        (lambda here: check_running(3), "3 responses are running; wait until they end, or pass on_running='abort'"),
    ],
)
def test_refusals_name_both_sides_and_the_remedy(attempt: Callable[[EngineResidence], object], message: str) -> None:
    residence = EngineResidence()
    with pytest.raises(EngineResidenceError, match=re.escape(message)):
        attempt(residence)
    assert residence.away() == frozenset()


def test_a_failed_move_is_broken_permanently() -> None:
    residence = EngineResidence()
    with pytest.raises(MemoryError), residence.moving(frozenset(BOTH), Residence.OFFLOADED):
        raise MemoryError
    assert set(residence.states().values()) == {Residence.BROKEN}
    for attempt in (residence.to_load, residence.to_offload):
        with pytest.raises(EngineResidenceError, match=r"kv_cache, params broke in an earlier switch; start a new engine"):
            attempt(BOTH)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["offload", "load"]), st.sets(st.sampled_from(sorted(ENGINE_KINDS)))), max_size=12))
def test_only_what_has_to_move_moves(calls: list[tuple[str, set[StateKind]]]) -> None:
    residence = EngineResidence()
    away: set[StateKind] = set()
    for call, kinds in calls:
        if call == "load":
            moved = residence.to_load(kinds)
            assert moved == kinds & away
            move(residence, moved, Residence.ON_DEVICE)
            away -= kinds
        elif PARAMS in kinds and CACHE not in kinds | away:
            with pytest.raises(EngineResidenceError):
                residence.to_offload(kinds)
        else:
            moved = residence.to_offload(kinds)
            assert moved == kinds - away
            move(residence, moved, Residence.OFFLOADED)
            away |= kinds
        assert residence.away() == away
        assert (residence.refusal("score") is None) == (not away)


# -- the fake engine --------------------------------------------------------------------------------------------------------------


def test_reports_and_snapshots_are_the_declared_sizes() -> None:
    engine = FakeEngine(memory=FakeMemory(sizes_bytes={PARAMS: 70, CACHE: 900}, offload_s=2.0, load_s=3.0))
    off = engine.offload(BOTH, 5.0)
    assert (off.direction, off.freed_bytes, off.copied_bytes, off.undefined) == ("offload", {PARAMS: 70, CACHE: 900}, {}, frozenset())
    assert (off.before.allocated_bytes, off.after.allocated_bytes, off.after.peak_bytes, off.elapsed_s) == (970, 0, 970, 2.0)
    assert engine.residence() == dict.fromkeys(BOTH, Residence.OFFLOADED)
    again = engine.offload(BOTH, 5.0)
    assert (again.freed_bytes, again.elapsed_s) == ({}, 0.0)
    on = engine.load({PARAMS}, 5.0)
    assert (on.direction, on.freed_bytes, on.undefined, on.after.allocated_bytes) == ("load", {PARAMS: 70}, frozenset({PARAMS}), 70)
    assert engine.now_s == 5.0
    push(engine, 1)
    assert engine.load(BOTH, 5.0).undefined == frozenset()
    assert engine.memory().allocated_bytes == 970


def test_requests_given_while_away_wait_for_the_update_and_the_cache() -> None:
    engine = FakeEngine()
    engine.offload(BOTH, 1.0)
    engine.submit(requests("early"))
    assert collected(engine, 1.0) == []
    with pytest.raises(EngineResidenceError, match="score: the engine's kv_cache, params are not on the device; load them first"):
        engine.score([(1, 2)], 1.0)
    open_update(engine, 1)
    with pytest.raises(WeightSyncError, match="version 1: the engine's weights are offloaded; load params, then finish the update again"):
        engine.finish_update(1.0)
    engine.load({PARAMS}, 1.0)
    assert collected(engine, 1.0) == []  # at rest, no error: the cache is away
    assert engine.finish_update(1.0) == 1
    assert collected(engine, 1.0) == []
    engine.load({CACHE}, 1.0)
    (found,) = collected(engine, 1.0)
    assert (found.request_id, {span.version for span in found.segment.version_spans}) == ("early", {1})


def test_loaded_without_an_update_it_refuses_to_answer() -> None:
    engine = FakeEngine()
    engine.offload(BOTH, 1.0)
    engine.load(BOTH, 1.0)
    engine.submit(requests("waits"))
    for ask in (lambda: collected(engine, 1.0), lambda: engine.score([(1, 2)], 1.0)):
        with pytest.raises(WeightSyncError, match="its weights were discarded by an offload and no full update came since; send a full"):
            ask()
    engine.lose_tensor("a.weight")
    open_update(engine, 1)
    with pytest.raises(WeightSyncError, match=r"got no data for a\.weight"):
        engine.finish_update(1.0)
    with pytest.raises(WeightSyncError, match="update to version 1 broke off"):
        collected(engine, 1.0)
    push(engine, 2)
    assert [completion.request_id for completion in collected(engine, 1.0)] == ["waits"]


def test_copied_weights_are_defined_after_the_load() -> None:
    engine = FakeEngine(memory=FakeMemory(copies_weights=True))
    assert engine.offload(BOTH, 1.0).copied_bytes == {PARAMS: 1000}
    assert engine.memory().pinned_bytes == 1000
    report = engine.load(BOTH, 1.0)
    assert (report.copied_bytes, report.undefined) == ({PARAMS: 1000}, frozenset())
    engine.submit(requests("at once"))
    assert len(collected(engine, 1.0)) == 1


def test_running_responses_refuse_abort_or_go_on() -> None:
    engine = never_ending()
    engine.submit(requests("a", "b"))
    engine.advance(2)
    engine.submit(requests("untouched"))
    with pytest.raises(EngineResidenceError, match="2 responses are running"):
        engine.offload({CACHE}, 1.0)
    assert engine.residence()[CACHE] is Residence.ON_DEVICE
    engine.offload({CACHE}, 1.0, "keep")
    engine.advance(3)  # nothing is computed
    engine.load({CACHE}, 1.0)
    engine.offload({CACHE}, 1.0)  # queued responses are no running ones
    engine.load({CACHE}, 1.0)
    engine.advance(1)
    engine.offload({CACHE}, 1.0, "abort")
    sampled = {completion.request_id: (completion.finish_reason, len(completion.segment)) for completion in collected(engine, 0.0)}
    assert sampled == {"a": ("abort", 3), "b": ("abort", 3), "untouched": ("abort", 1)}


def test_a_kept_response_is_what_it_would_have_been() -> None:
    found = []
    for interrupted in (False, True):
        engine = never_ending()
        engine.submit(requests("a"))
        engine.advance(2)
        if interrupted:
            engine.offload({CACHE}, 1.0, "keep")
            engine.load({CACHE}, 1.0)
        engine.advance(4)
        found += collected(engine, 0.0)
    assert found[0] == found[1]


def test_a_switch_that_takes_too_long_changes_nothing() -> None:
    engine = FakeEngine(memory=FakeMemory(offload_s=3.0, load_s=4.0))
    with pytest.raises(DeadlineError, match=r"offload of kv_cache, params took longer than 2\.0 s"):
        engine.offload(BOTH, 2.0)
    assert set(engine.residence().values()) == {Residence.ON_DEVICE}
    engine.offload(BOTH, 3.0)
    with pytest.raises(DeadlineError, match=r"load of params took longer than 3\.0 s"):
        engine.load({PARAMS}, 3.0)
    assert set(engine.residence().values()) == {Residence.OFFLOADED}


@pytest.mark.parametrize("direction", ["offload", "load"])
def test_a_switch_that_breaks_off_ends_the_engine(direction: str) -> None:
    engine = FakeEngine()
    if direction == "load":
        engine.offload(BOTH, 1.0)
    engine.fail_next_switch("no more memory")
    calls: list[Callable[[], object]] = [
        lambda: getattr(engine, direction)(BOTH, 1.0),
        lambda: engine.load(BOTH, 1.0),
        lambda: engine.offload(BOTH, 1.0),
        engine.residence,
        engine.memory,
        engine.version,
        lambda: collected(engine, 1.0),
        lambda: engine.score([(1, 2)], 1.0),
        lambda: engine.submit(requests("x")),
    ]
    for call in calls:
        with pytest.raises(
            EngineDiedError, match=f"{direction} of kv_cache, params broke off half-way: no more memory; start a new engine"
        ):
            call()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["offload", "keep", "abort", "load params", "load cache", "update", "bad update", "submit", "collect", "advance"]),
        max_size=25,
    )
)
def test_whatever_the_order_nothing_is_sampled_from_undefined_or_absent_weights(calls: list[str]) -> None:
    engine = FakeEngine(automatic=False, length_of=lambda request: 4)
    defined, submitted, ended = True, 0, 0
    for number, call in enumerate(calls):
        sampled = engine.stats()["generated_tokens"]
        may_draw = defined and set(engine.residence().values()) == {Residence.ON_DEVICE}
        try:
            if call in ("offload", "keep", "abort"):
                engine.offload(BOTH, 1.0, ON_RUNNING[call])
                defined = False
            elif call.startswith("load"):
                engine.load({PARAMS if call.endswith("params") else CACHE}, 1.0)
            elif call == "bad update" and engine.residence()[PARAMS] is Residence.ON_DEVICE:
                defined = False
                engine.lose_tensor("a.weight")
                push(engine, number)
            elif call == "update":
                push(engine, number)
                defined = True
            elif call == "submit":
                engine.submit(requests(f"r{number}"))
                submitted += 1
            elif call == "collect":
                ended += len(collected(engine, 1.0))
            elif call == "advance":
                engine.advance()
        except (EngineResidenceError, WeightSyncError):
            pass
        assert may_draw or engine.stats()["generated_tokens"] == sampled
    engine.load(BOTH, 1.0)
    push(engine, 99)
    engine.advance(4)
    assert ended + len(collected(engine, 0.0)) == submitted  # none lost, none twice
