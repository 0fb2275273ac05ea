"""Real SGLang on CPU, its server in its own interpreter, behind the engine protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rljob_runtime.engine.protocol import EngineResidenceError
from rljob_runtime.engine.sglang import arguments, interpreter
from rljob_runtime.engine.sglang import weights as sent
from rljob_runtime.engine.sglang.client import RefusedError
from rljob_runtime.engine.sglang.engine import SglangEngine
from rljob_runtime.errors import EngineDiedError, SetupError, WeightSyncError
from rljob_runtime.records import Sampling, VersionSpan
from rljob_runtime.weightsync.packing import ByteArray
from tests.support.engine_contract import (
    LONG,
    TIMEOUT_S,
    TOLERANCE,
    EngineContract,
    config_for,
    drain,
    endless,
    expected_logprobs,
    expected_scores,
    generate,
    letters,
    manifest_of,
    new_model,
    packed,
    push,
    request,
    save,
    wait_for_tokens,
    weights,
)
from tests.support.offload_contract import BOTH, CACHE_BYTES, PARAMS, OffloadContract
from tests.support.pace import until
from tests.support.records import collected, tokens
from tests.support.sglang_bits import check_bits_after_updates, expected_bits, served_bits
from tests.support.sglang_installed import require_sglang
from tests.support.sparse_updates import PACKED_RECEIVER

START_S = 900.0
"""The server's start takes half a minute of computing, on a machine with other work; nothing here depends on it."""
pytestmark = [pytest.mark.timeout(2 * START_S), pytest.mark.usefixtures("forked_servers")]


require_sglang()


def started(factory: pytest.TempPathFactory, *, tied: bool = False, **settings: object) -> Iterator[SglangEngine]:
    model = save(new_model(tied=tied, seed=0), factory.mktemp("model"))
    config = replace(config_for(model), tokenizer_path=letters(factory.mktemp("letters")), finds_texts=True, start_timeout_s=START_S)
    engine = SglangEngine(replace(config, **settings))
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """The one server of this module's quick tests."""
    yield from started(tmp_path_factory)


@pytest.fixture(scope="module")
def uncached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """Another one, of two ranks, which shares no prefixes; of slow tests."""
    yield from started(tmp_path_factory, enable_prefix_caching=False, tensor_parallel_size=2)


@pytest.fixture
def engine(server: SglangEngine) -> SglangEngine:
    """With known weights under a version of its own."""
    push(server, new_model(tied=False, seed=0), server.version() + 1)
    return server


class TestSglang(EngineContract):
    """The contract of all engines."""

    stops_at_once = False


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    """One that gives its memory back."""
    yield from started(tmp_path_factory, release="discard", kv_cache_bytes=CACHE_BYTES)


@pytest.mark.slow
class TestSglangOffload(OffloadContract):
    """The contract of all engines that give their memory back."""

    @pytest.fixture
    def engine(self, leaving: SglangEngine) -> SglangEngine:
        leaving.load(BOTH, TIMEOUT_S)
        push(leaving, new_model(tied=False, seed=0), leaving.version() + 1)
        return leaving

    def test_a_move_that_breaks_off_ends_the_engine(self, engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        """Last of the class: the engine is dead afterwards."""

        async def refused(path: str, body: object, timeout_s: float | None = None) -> object:
            if path == "/resume_memory_occupation":
                raise RefusedError("no room")
            return await post(path, body, timeout_s)

        engine.offload(BOTH, TIMEOUT_S)
        engine.submit([endless("never", 0)])
        post = engine.session.client.post
        monkeypatch.setattr(engine.session.client, "post", refused)
        for call in (lambda: engine.load(BOTH, TIMEOUT_S), lambda: collected(engine, TIMEOUT_S), lambda: engine.score([(1, 2)], TIMEOUT_S)):
            with pytest.raises(EngineDiedError, match=r"load of kv_cache, params broke off half-way: RefusedError: no room; start a new"):
                call()
        engine.shutdown()  # a paused server keeps one core busy, for as long as the other tests of the module take


@pytest.mark.slow
def test_weights_that_are_kept_come_back_bit_for_bit_and_so_do_updates_of_a_tied_model_in_bfloat16(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first, second = ({name: tensor.bfloat16() for name, tensor in weights(new_model(tied=True, seed=seed)).items()} for seed in (0, 1))
    for engine in started(tmp_path_factory, tied=True, dtype="bfloat16", release="copy", kv_cache_bytes=CACHE_BYTES):
        assert served_bits(engine) == [expected_bits(first)]
        expected = engine.score([(5, 6, 7, 8)], TIMEOUT_S)
        off = engine.offload(BOTH, TIMEOUT_S)
        assert off.copied_bytes == {PARAMS: off.freed_bytes[PARAMS]}
        assert engine.load(BOTH, TIMEOUT_S).undefined == frozenset()
        assert engine.score([(5, 6, 7, 8)], TIMEOUT_S) == expected
        assert served_bits(engine) == [expected_bits(first)]
        check_bits_after_updates(engine, first, second)


def test_after_dense_mixed_and_sparse_updates_every_tensor_has_the_trainers_bits(engine: SglangEngine) -> None:
    """Fused projections of queries, keys and values, of gate and up, and an own head among them, in float32."""
    check_bits_after_updates(engine, *(weights(new_model(tied=False, seed=seed)) for seed in (0, 1)))
    engine.prepare_receiver(PACKED_RECEIVER, {})


def test_an_engine_that_keeps_its_memory_refuses_to_release(engine: SglangEngine) -> None:
    with pytest.raises(EngineResidenceError, match="release='never'"):
        engine.offload(BOTH, TIMEOUT_S)


def test_more_requests_than_the_server_takes_at_once_all_come_back(engine: SglangEngine) -> None:
    found = generate(engine, [request(f"r{i}", Sampling(max_tokens=1 + i % 7), prompt=(3 + i % 50, 9, 4)) for i in range(150)])
    assert sorted(len(completion.segment) for completion in found.values()) == sorted(1 + i % 7 for i in range(150))
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0


def test_an_abort_of_one_request_leaves_those_whose_number_begins_alike(engine: SglangEngine) -> None:
    engine.submit([endless(f"r{i}") for i in range(30)])
    wait_for_tokens(engine, 30)
    engine.abort(["r0", "r1", "r2"])
    found = drain(engine, 30)
    assert {name for name, completion in found.items() if completion.finish_reason == "abort"} == {"r0", "r1", "r2"}


def test_what_waits_here_is_aborted_without_a_token(engine: SglangEngine) -> None:
    engine.submit([endless(f"r{i}") for i in range(70)])  # 64 at the server
    engine.abort(["r69"])
    assert len(drain(engine, 1)["r69"].segment) == 0
    engine.abort([f"r{i}" for i in range(69)])
    assert {completion.finish_reason for completion in drain(engine, 69).values()} <= {"abort", "length"}


def test_keep_is_refused_where_prefixes_are_cached(engine: SglangEngine) -> None:
    version = engine.version()
    with pytest.raises(WeightSyncError, match="cannot drop cached prefixes"):
        push(engine, new_model(tied=False, seed=6), version + 1, "keep")
    assert engine.version() == version
    assert len(generate(engine, [request("later", Sampling(max_tokens=2))])) == 1


@pytest.mark.slow
def test_after_updates_every_rank_has_its_part_of_the_trainers_bits(uncached: SglangEngine) -> None:
    assert len(served_bits(uncached)) == 2
    check_bits_after_updates(uncached, *(weights(new_model(tied=False, seed=seed)) for seed in (0, 1)))
    uncached.prepare_receiver(PACKED_RECEIVER, {})


@pytest.mark.slow
def test_keep_goes_on_with_old_keys_and_new_requests_do_not_see_them(uncached: SglangEngine) -> None:
    old, new = new_model(tied=False, seed=0), new_model(tied=False, seed=6)
    shared = tuple(range(3, 59)) * 5
    generate(uncached, [request("warm", Sampling(max_tokens=1), 0, shared)])
    uncached.submit([endless(f"r{i}") for i in range(4)])
    wait_for_tokens(uncached, 80)
    push(uncached, new, uncached.version() + 1, "keep")
    uncached.submit([request("fresh", Sampling(max_tokens=4), 1, shared)])
    found = drain(uncached, 5)
    mixed = [found[f"r{i}"] for i in range(4) if len(found[f"r{i}"].segment.version_spans) == 2]
    assert len(mixed) >= 2
    for completion in mixed:
        end = completion.segment.version_spans[0].end
        first, second = (expected_logprobs(model, (5, 17, 33, 8), LONG, tokens(completion)) for model in (old, new))
        assert completion.segment.logprobs[:end] == pytest.approx(first[:end], abs=TOLERANCE)
        differences = [abs(a - b) for a, b in zip(completion.segment.logprobs[end:], second[end:], strict=True)]
        assert max(differences) > 100 * TOLERANCE, "keys of the old weights are kept"
    expected = expected_logprobs(new, shared, Sampling(max_tokens=4), tokens(found["fresh"]))
    assert found["fresh"].segment.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_an_update_that_breaks_off_stops_generation_until_a_full_one(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the buckets are in the server, whose own update is open."""
    whole, calls = sent.shared, []

    def fail_on_second(data: ByteArray) -> torch.Tensor:
        calls.append(data)
        if len(calls) == 2:
            raise WeightSyncError("broken bucket")
        return whole(data)

    monkeypatch.setattr(sent, "shared", fail_on_second)
    tensors = weights(new_model(tied=False, seed=1))
    manifest = manifest_of(tensors)
    engine.begin_update(manifest, 90)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, packed(bucket, tensors))
    with pytest.raises(WeightSyncError, match="broken bucket"):
        engine.finish_update(TIMEOUT_S)
    engine.submit([request("waits", Sampling(max_tokens=2))])
    with pytest.raises(WeightSyncError, match="version 90 broke off"):
        collected(engine, 1.0)
    monkeypatch.undo()
    model = new_model(tied=False, seed=2)
    push(engine, model, 91)
    assert drain(engine, 1)["waits"].segment.version_spans == (VersionSpan(start=0, end=2, version=91),)
    assert engine.score([(5, 6, 7)], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, (5, 6, 7)), abs=TOLERANCE)


def test_its_own_parser_says_what_is_wrong_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "CHILD_TIMEOUT_S", START_S)
    given = {"chunked_prefill_sise": 16, "schedule_policy": "random-walk", "page_size": "many", "schedule_conservativeness": 0.5}
    given |= {"enable_multimodal": False, "disable_custom_all_reduce": False, "schedule_sise": False}
    problems = [str(problem) for problem in arguments.problems_in_child("extraArgs", given)]
    assert problems[0] == "extraArgs.chunked_prefill_sise: 16: is not an argument of SGLang; did you mean chunked_prefill_size?"
    assert problems[1].startswith(
        'extraArgs.schedule_policy: "random-walk": is refused by SGLang: argument --schedule-policy: invalid choice'
    )
    assert problems[2].startswith('extraArgs.page_size: "many": is refused by SGLang: argument --page-size: invalid int value')
    assert problems[3].startswith("extraArgs.enable_multimodal: false: is refused by SGLang: it is no switch that is off by itself")
    assert problems[4].startswith("extraArgs.schedule_sise: false: is not an argument of SGLang")
    assert len(problems) == 5


def test_an_interpreter_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(interpreter.VARIABLE, str(tmp_path / "python"))
    with pytest.raises(SetupError, match=r"RLJOB_SGLANG_PYTHON is .*, which is not a program here; run make setup-sglang"):
        interpreter.sglang_python()


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def check_death(server: SglangEngine, victim: Callable[[list[psutil.Process]], psutil.Process]) -> None:
    """Kill one of the server's processes; the server is gone afterwards."""
    push(server, new_model(tied=False, seed=0), server.version() + 1)
    server.submit([endless("never")])
    wait_for_tokens(server, 1)
    family = [psutil.Process(pid) for pid in server.server_pids()]
    victim(family).kill()
    with pytest.raises(EngineDiedError, match="SGLang"):
        collected(server, TIMEOUT_S)
    for call in (
        lambda: server.submit([endless("later")]),
        lambda: server.score([(1, 2)], TIMEOUT_S),
        lambda: server.abort(["never"]),
        server.version,
        server.stats,
    ):
        with pytest.raises(EngineDiedError):
            call()
    until("the server's processes end", lambda: not any(lives(process) for process in family[1:]))
    server.shutdown()


@pytest.mark.slow
def test_a_killed_scheduler_takes_all_with_it(uncached: SglangEngine) -> None:
    check_death(uncached, lambda family: next(process for process in family if "scheduler" in " ".join(process.cmdline())))


def test_no_process_is_left_where_the_one_that_watches_is_killed(server: SglangEngine) -> None:
    """Last of the module: what Ray does to the children of a worker that ends."""
    check_death(server, lambda family: family[0])
