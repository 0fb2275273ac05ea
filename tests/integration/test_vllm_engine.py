"""Real vLLM on CPU behind the engine protocol, compared with transformers token by token."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment
from rljob_runtime.errors import CorruptedWeightsError, DataError, DeadlineError, EngineDiedError, ModelError, WeightSyncError
from rljob_runtime.records import Bucket, Completion, GenerationRequest, Sampling, VersionSpan, WeightManifest
from rljob_runtime.weightsync.packing import pack, plan_buckets
from rljob_runtime.weightsync.parcel import Parcel, sealed
from rljob_runtime.weightsync.shared_memory import Segments
from tests.support.pace import HANG_S
from tests.support.records import collected, ids, tokens

VOCAB = 60
EOS = 2
MAX_LEN = 512
TIMEOUT_S = HANG_S
TOLERANCE = 1e-4


def new_model(*, tied: bool, seed: int) -> Qwen2ForCausalLM:
    """Random two-layer Qwen2; weights large enough that distributions are far from uniform. Only the tied one knows an end token.

    Drawn from a generator of its own: the engine's thread draws from torch's global one while a test makes a model.
    """
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS if tied else None,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, config.initializer_range, generator=own)
    return model


def save(model: Qwen2ForCausalLM, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def config_for(path: str) -> EngineConfig:
    return EngineConfig(model_path=path, max_model_len=MAX_LEN, max_num_seqs=64, kv_cache_bytes=32 << 20, threads=1)


def letters(folder: Path) -> str:
    """A tokenizer whose tokens are single characters."""
    backend = Tokenizer(WordLevel({chr(ord("0") + i): i for i in range(VOCAB)}))
    backend.decoder = Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return str(folder)


def started(path: str, **settings: object) -> Iterator[VllmEngine]:
    config = replace(config_for(path), **settings)
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT_TO_UNSET:
            patch.delenv(name, raising=False)
        for name, value in engine_environment(config).items():
            patch.setenv(name, value)
        engine = VllmEngine(config)
        yield engine
        engine.shutdown()


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    model = save(new_model(tied=False, seed=0), tmp_path_factory.mktemp("untied"))
    yield from started(model, tokenizer_path=letters(tmp_path_factory.mktemp("letters")), finds_texts=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    yield from started(save(new_model(tied=True, seed=0), tmp_path_factory.mktemp("tied")))


@pytest.fixture
def engine(untied: VllmEngine) -> VllmEngine:
    """The untied engine with known weights under a version of its own."""
    push(untied, new_model(tied=False, seed=0), untied.version() + 1)
    return untied


def weights(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def manifest_of(tensors: dict[str, torch.Tensor], bucket_bytes: int = 100_000) -> WeightManifest:
    return plan_buckets([(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()], bucket_bytes)


def packed(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    out = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, tensors, out)
    return out


def push(engine: VllmEngine, model: Qwen2ForCausalLM, version: int, on_running: str = "recompute") -> None:
    """A whole update, buckets in reverse order through one reused buffer."""
    tensors = weights(model)
    manifest = manifest_of(tensors)
    assert len(manifest.buckets) > 2
    engine.begin_update(manifest, version)
    buffer = np.zeros(max(bucket.size_bytes for bucket in manifest.buckets), dtype=np.uint8)
    for bucket in reversed(manifest.buckets):
        pack(bucket, tensors, buffer)
        engine.load_bucket(bucket.index, buffer[: bucket.size_bytes])
    assert engine.finish_update(TIMEOUT_S, on_running) == version
    assert engine.version() == version


def push_shared(engine: VllmEngine, model: Qwen2ForCausalLM, version: int) -> None:
    """The same through two segments of shared memory that take turns; layers are larger than a bucket."""
    tensors = weights(model)
    manifest = manifest_of(tensors, 50_000)
    assert len(manifest.buckets) > 4
    segments = Segments(f"rljob-vllm{os.getpid()}-", 2, max(bucket.size_bytes for bucket in manifest.buckets))

    def written(bucket: Bucket) -> Parcel:
        data = segments.array(bucket.index % 2, bucket.size_bytes)
        pack(bucket, tensors, data)
        return sealed(version, data, segments.shared(bucket.index % 2, bucket.size_bytes))

    test = {"streams": True, "test": written(manifest.buckets[0])}
    engine.prepare_receiver("rljob_runtime.weightsync.transports.shared_memory:SharedReceiver", test)
    engine.begin_update(manifest, version)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, written(bucket))
    assert engine.finish_update(TIMEOUT_S) == version
    segments.close()
    engine.prepare_receiver("rljob_runtime.weightsync.transports.object_store:PackedReceiver", {})


def all_logprobs(model: Qwen2ForCausalLM, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Row i: log-probs of the token after position i."""
    with torch.no_grad():
        return (model(torch.tensor([list(token_ids)])).logits[0] / temperature).log_softmax(-1)


def expected_scores(model: Qwen2ForCausalLM, token_ids: Sequence[int]) -> list[float]:
    rows = all_logprobs(model, token_ids)
    return [rows[i, token].item() for i, token in enumerate(token_ids[1:])]


def expected_logprobs(model: Qwen2ForCausalLM, prompt: Sequence[int], sampling: Sampling, response: Sequence[int]) -> list[float]:
    """What transformers gives for a drawn response after temperature, top-k, min-p and top-p."""
    rows = all_logprobs(model, [*prompt, *response], sampling.temperature)[len(prompt) - 1 : -1]
    found = []
    for row, token in zip(rows, response, strict=True):
        probs = row.exp()
        if sampling.min_p > 0:
            probs[probs < sampling.min_p * probs.max()] = 0
        if sampling.top_k > 0:
            probs[probs < probs.topk(sampling.top_k).values[-1]] = 0
        probs /= probs.sum()
        order = probs.argsort(descending=True)
        before = probs[order].cumsum(0) - probs[order]
        probs[order[before >= sampling.top_p]] = 0
        found.append((probs[token] / probs.sum()).log().item())
    return found


def request(name: str, sampling: Sampling, seed: int = 0, prompt: Sequence[int] = (5, 17, 33, 8)) -> GenerationRequest:
    return GenerationRequest(request_id=name, prompt_token_ids=ids(*prompt), sampling=sampling, seed=seed)


def drain(engine: VllmEngine, count: int) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} responses"
        found |= {completion.request_id: completion for completion in collected(engine, 1.0)}
    return found


def generate(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    engine.submit(requests)
    return drain(engine, len(requests))


def wait_for_tokens(engine: VllmEngine, count: int) -> None:
    """Until the engine drew ``count`` more tokens than when called."""
    goal = engine.stats()["generated_tokens"] + count
    deadline = time.monotonic() + TIMEOUT_S
    while engine.stats()["generated_tokens"] < goal:
        assert time.monotonic() < deadline
        assert collected(engine, 0.001) == []


LONG = Sampling(max_tokens=300)
"""Long enough to still run when the test acts on it: the untied model has no end-of-sequence token."""


def endless(name: str, seed: int = 0) -> GenerationRequest:
    return request(name, LONG, seed)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=12),
        Sampling(max_tokens=12, temperature=0.7),
        Sampling(max_tokens=12, temperature=0.7, top_p=0.8),
        Sampling(max_tokens=12, temperature=1.3, top_k=5),
        Sampling(max_tokens=12, min_p=0.1),
        Sampling(max_tokens=12, temperature=0.0),
    ],
    ids=lambda s: f"t{s.temperature}-p{s.top_p}-k{s.top_k}-m{s.min_p}",
)
def test_logprobs_are_those_of_the_distribution_drawn_from(engine: VllmEngine, sampling: Sampling) -> None:
    model = new_model(tied=False, seed=0)
    found = generate(engine, [request(f"r{seed}", sampling, seed) for seed in range(6)])
    for completion in found.values():
        behaviour = replace(sampling, temperature=sampling.temperature or 1.0)
        expected = expected_logprobs(model, (5, 17, 33, 8), behaviour, tokens(completion))
        assert completion.segment.logprobs == pytest.approx(expected, abs=TOLERANCE)
        assert completion.segment.version_spans == (VersionSpan(start=0, end=len(tokens(completion)), version=engine.version()),)
        if sampling.temperature == 0:
            greedy = all_logprobs(model, [5, 17, 33, 8, *tokens(completion)]).argmax(-1)[3:-1]
            assert tokens(completion) == tuple(greedy.tolist())
        assert (completion.finish_reason, len(tokens(completion))) == ("length", 12)


def test_stop_tokens_end_a_response_and_stay_in_it(engine: VllmEngine) -> None:
    free = tokens(generate(engine, [request("free", Sampling(max_tokens=12), 3)])["free"])
    stop = free[5]
    stopped = generate(engine, [request("stopped", Sampling(max_tokens=12, stop_token_ids=(stop,)), 3)])["stopped"]
    assert tokens(stopped) == free[: free.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_a_response_ends_with_the_token_that_completes_a_stop_string(engine: VllmEngine) -> None:
    """Also where the string began on another engine; nothing behind it is sampled, and what comes before is as it was."""
    free = generate(engine, [request("free", Sampling(max_tokens=12, top_k=8, returns_mask=True), 3)])["free"]
    text = "".join(chr(ord("0") + token) for token in tokens(free))
    sampling = Sampling(max_tokens=12, top_k=8, returns_mask=True, stop_strings=("never", text[4:7]))
    before = engine.stats()["generated_tokens"]
    stopped = generate(engine, [request("stopped", sampling, 3)])["stopped"]
    end = text.index(text[4:7]) + 3
    assert (tokens(stopped), stopped.finish_reason) == (tokens(free)[:end], "stop")
    assert engine.stats()["generated_tokens"] - before == end
    assert stopped.segment.logprobs.tolist() == free.segment.logprobs[:end].tolist()
    assert stopped.segment.sampling_mask is not None
    assert stopped.segment.sampling_mask.counts.size == end
    assert stopped.segment.version_spans == (VersionSpan(start=0, end=end, version=engine.version()),)
    begun = (5, 17, 33, 8, *tokens(free)[: end - 1])
    greedy = tokens(generate(engine, [request("greedy", Sampling(max_tokens=1, temperature=0.0), prompt=begun)])["greedy"])
    stops = (text[end - 3 : end - 1] + chr(ord("0") + greedy[0]),)
    later = replace(request("later", Sampling(max_tokens=5, temperature=0.0, stop_strings=stops), prompt=begun), num_sampled_before=end - 1)
    found = generate(engine, [later])["later"]
    assert (tokens(found), found.finish_reason) == (greedy, "stop")


def test_the_models_own_end_token_ends_a_response(tied: VllmEngine) -> None:
    found = generate(tied, [request(f"r{seed}", Sampling(max_tokens=40), seed) for seed in range(40)])
    ended = [completion for completion in found.values() if completion.finish_reason == "stop"]
    assert 5 < len(ended) < 40
    assert all(tokens(completion).index(EOS) == len(tokens(completion)) - 1 for completion in ended)
    assert all(EOS not in tokens(completion) for completion in found.values() if completion.finish_reason == "length")


def test_the_same_seed_draws_the_same_tokens_alone_and_in_company(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=24)
    alone = generate(engine, [request("alone", sampling, 7)])["alone"]
    crowd = [request(f"c{i}", Sampling(max_tokens=5 + i % 20, temperature=0.9), 1000 + i, (3 + i % 50, 9, 4)) for i in range(90)]
    crowd.insert(70, request("same", sampling, 7))
    found = generate(engine, crowd)
    assert tokens(found["same"]) == tokens(alone)
    assert found["same"].segment.logprobs == pytest.approx(alone.segment.logprobs, abs=TOLERANCE)
    others = generate(engine, [request(f"s{seed}", sampling, seed) for seed in range(8)])
    assert len({tokens(completion) for completion in others.values()}) > 1


@pytest.mark.parametrize("bring", [push, push_shared])
@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_after_an_update_scores_are_those_of_the_new_weights(
    kind: str, bring: Callable[[VllmEngine, Qwen2ForCausalLM, int], None], request: pytest.FixtureRequest
) -> None:
    target: VllmEngine = request.getfixturevalue(kind)
    probes = [(5, 17, 33, 8, 9, 10), (4, 4), tuple(range(1, 59)) * 6]
    for seed in (11, 12):
        model = new_model(tied=kind == "tied", seed=seed)
        before = target.score(probes, TIMEOUT_S)
        bring(target, model, target.version() + 1)
        after = target.score(probes, TIMEOUT_S)
        for probe, old, new in zip(probes, before, after, strict=True):
            assert new == pytest.approx(expected_scores(model, probe), abs=TOLERANCE)
            assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1


@pytest.mark.slow
def test_tensor_parallel_ranks_read_shared_memory_themselves(tmp_path: Path) -> None:
    model = new_model(tied=True, seed=14)
    for engine in started(save(new_model(tied=True, seed=0), tmp_path), tensor_parallel_size=2):
        push_shared(engine, model, 1)
        probe = (5, 17, 33, 8, 9, 10)
        assert engine.score([probe], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, probe), abs=TOLERANCE)


def test_a_streamed_update_that_breaks_off_stops_the_engine_until_a_full_one(engine: VllmEngine) -> None:
    old, model = engine.version(), new_model(tied=False, seed=13)
    engine.submit([endless(f"r{i}", i) for i in range(4)])
    wait_for_tokens(engine, 40)
    segments = Segments(f"rljob-vllm{os.getpid()}-", 1, 100_000)
    manifest = manifest_of(weights(model))
    first = manifest.buckets[0]
    pack(first, weights(model), segments.array(0, first.size_bytes))
    parcel = sealed(old + 1, segments.array(0, first.size_bytes), segments.shared(0, first.size_bytes))
    engine.prepare_receiver("rljob_runtime.weightsync.transports.shared_memory:SharedReceiver", {"streams": True, "test": parcel})
    engine.begin_update(manifest, old + 1)
    engine.load_bucket(0, parcel)
    generated = engine.stats()["generated_tokens"]
    assert len(engine.collect(0.01).request_ids) == 0  # an update under way is no error
    with pytest.raises(CorruptedWeightsError):
        engine.load_bucket(1, replace(parcel, checksum=parcel.checksum ^ 1))
    with pytest.raises(WeightSyncError, match="buckets never arrived"):
        engine.finish_update(TIMEOUT_S)
    assert engine.stats()["generated_tokens"] == generated
    assert engine.version() == old
    segments.close()
    engine.prepare_receiver("rljob_runtime.weightsync.transports.object_store:PackedReceiver", {})
    push(engine, model, old + 2)
    found = drain(engine, 4)
    assert {completion.segment.version_spans[-1].version for completion in found.values()} == {old + 2}


def test_a_tied_head_may_be_in_the_manifest(tied: VllmEngine) -> None:
    model = new_model(tied=True, seed=21)
    tensors = weights(model) | {"lm_head.weight": model.lm_head.weight.detach()}
    manifest = manifest_of(tensors)
    tied.begin_update(manifest, 77)
    for bucket in manifest.buckets:
        tied.load_bucket(bucket.index, packed(bucket, tensors))
    assert tied.finish_update(TIMEOUT_S) == 77
    assert tied.score([(5, 6, 7)], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, (5, 6, 7)), abs=TOLERANCE)


def test_an_update_in_flight_recomputes_and_marks_spans(engine: VllmEngine) -> None:
    old_version = engine.version()
    new = new_model(tied=False, seed=5)
    engine.submit([endless(f"r{i}", i) for i in range(8)])
    wait_for_tokens(engine, 80)
    push(engine, new, old_version + 1)
    found = drain(engine, 8)
    mixed = [completion for completion in found.values() if len(completion.segment.version_spans) == 2]
    assert len(mixed) >= 3
    for completion in mixed:
        first, second = completion.segment.version_spans
        assert (first.start, first.end, second.end) == (0, second.start, len(tokens(completion)))
        assert (first.version, second.version) == (old_version, old_version + 1)
        for model, span in ((new_model(tied=False, seed=0), first), (new, second)):
            expected = expected_logprobs(model, (5, 17, 33, 8), LONG, tokens(completion))
            assert completion.segment.logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=TOLERANCE)


def test_keep_goes_on_with_old_keys_and_new_requests_do_not_see_them(engine: VllmEngine) -> None:
    new = new_model(tied=False, seed=6)
    shared = tuple(range(3, 59)) * 5  # more than one cache block
    generate(engine, [request("warm", Sampling(max_tokens=1), 0, shared)])
    engine.submit([endless(f"r{i}", i) for i in range(4)])
    wait_for_tokens(engine, 40)
    push(engine, new, engine.version() + 1, "keep")
    engine.submit([request("fresh", Sampling(max_tokens=4), 1, shared)])
    found = drain(engine, 5)
    assert any(len(completion.segment.version_spans) == 2 for completion in found.values())
    expected = expected_logprobs(new, shared, Sampling(max_tokens=4), tokens(found["fresh"]))
    assert found["fresh"].segment.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_a_skipped_tensor_or_other_shape_is_refused_by_name(engine: VllmEngine) -> None:
    tensors = weights(new_model(tied=False, seed=1))
    short = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(WeightSyncError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        engine.begin_update(manifest_of(short), 5)
    with pytest.raises(WeightSyncError, match=r"not in the engine's model: extra"):
        engine.begin_update(manifest_of(tensors | {"extra": torch.zeros(1)}), 5)
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight \(65,\) instead of \(64,\)"):
        engine.begin_update(manifest_of(tensors | {"model.norm.weight": torch.zeros(65)}), 5)


def test_missing_repeated_and_wrong_buckets_are_refused_and_old_weights_stay(engine: VllmEngine) -> None:
    version = engine.version()
    before = engine.score([(5, 6, 7, 8)], TIMEOUT_S)
    tensors = weights(new_model(tied=False, seed=1))
    manifest = manifest_of(tensors)
    first, last = manifest.buckets[0], manifest.buckets[-1]
    engine.begin_update(manifest, version + 1)
    engine.load_bucket(0, packed(first, tensors))
    with pytest.raises(WeightSyncError, match="twice"):
        engine.load_bucket(0, packed(first, tensors))
    with pytest.raises(WeightSyncError, match=f"manifest says {last.size_bytes} bytes"):
        engine.load_bucket(last.index, packed(last, tensors)[:-1])
    with pytest.raises(WeightSyncError, match=f"index {len(manifest.buckets)} is outside"):
        engine.load_bucket(len(manifest.buckets), packed(first, tensors))
    with pytest.raises(WeightSyncError, match=r"never arrived .*model"):
        engine.finish_update(TIMEOUT_S)
    assert engine.version() == version
    assert engine.score([(5, 6, 7, 8)], TIMEOUT_S) == before


def test_a_failure_while_loading_stops_generation_until_a_full_update(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    receive = BucketReceiver.receive_weights
    calls = []

    def fail_on_third(self: BucketReceiver, update: object) -> None:
        calls.append(update)
        if len(calls) == 3:
            raise ValueError("broken bucket")
        receive(self, update)

    monkeypatch.setattr(BucketReceiver, "receive_weights", fail_on_third)
    # Small buckets, so that the failure leaves layers half loaded.
    tensors = weights(new_model(tied=False, seed=1))
    manifest = manifest_of(tensors, 9_000)
    engine.begin_update(manifest, 90)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, packed(bucket, tensors))
    with pytest.raises(WeightSyncError, match="broken bucket"):
        engine.finish_update(TIMEOUT_S)
    engine.submit([request("waits", Sampling(max_tokens=2))])
    with pytest.raises(WeightSyncError, match="version 90 broke off"):
        collected(engine, 1.0)
    with pytest.raises(WeightSyncError, match="version 90 broke off"):
        engine.score([(1, 2)], 1.0)
    model = new_model(tied=False, seed=2)
    push(engine, model, 91)
    assert drain(engine, 1)["waits"].segment.version_spans == (VersionSpan(start=0, end=2, version=91),)
    assert engine.score([(5, 6, 7)], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, (5, 6, 7)), abs=TOLERANCE)


def test_abort_returns_what_was_drawn(engine: VllmEngine) -> None:
    whole = generate(engine, [endless("whole", 1)])["whole"]
    engine.submit([endless("cut", 1), request("short", Sampling(max_tokens=2), 5)])
    assert drain(engine, 1).keys() == {"short"}
    engine.abort(["cut", "unknown", "short"])
    cut = drain(engine, 1)["cut"]
    assert cut.finish_reason == "abort"
    assert 2 <= len(tokens(cut)) < 300
    assert tokens(cut) == tokens(whole)[: len(tokens(cut))]
    assert len(cut.segment.logprobs) == len(tokens(cut)) == cut.segment.version_spans[-1].end
    assert engine.stats()["running"] == 0


def test_scoring_runs_beside_generation_and_has_a_deadline(engine: VllmEngine) -> None:
    engine.submit([endless(f"r{i}", i) for i in range(4)])
    wait_for_tokens(engine, 8)
    scores = engine.score([(5, 6, 7)], TIMEOUT_S)
    assert scores[0] == pytest.approx(expected_scores(new_model(tied=False, seed=0), (5, 6, 7)), abs=TOLERANCE)
    with pytest.raises(DeadlineError, match="scoring 1 sequences"):
        engine.score([tuple(range(3, 59)) * 8], 0.0)
    engine.abort([f"r{i}" for i in range(4)])
    drain(engine, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_token_ids": ids()}, "prompt has 0 tokens"),
        ({"prompt_token_ids": ids(*(1,) * MAX_LEN)}, f"prompt has {MAX_LEN} tokens"),
        ({"prompt_token_ids": ids(1, VOCAB + 1000)}, "token ids go from 1 to 1060"),
        ({"sampling": Sampling(max_tokens=0)}, "max_tokens >= 1"),
        ({"sampling": Sampling(max_tokens=1, temperature=0.001)}, "temperature 0.001"),
        ({"sampling": Sampling(max_tokens=1, top_p=0.0)}, "0 < top_p"),
    ],
)
def test_unservable_requests_are_refused_at_the_door(engine: VllmEngine, change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        engine.submit([request("good", Sampling(max_tokens=1)), replace(request("bad", Sampling(max_tokens=1)), **change)])
    assert generate(engine, [request("good", Sampling(max_tokens=1))]).keys() == {"good"}


def test_the_constructor_says_why_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.raises(ModelError, match="VLLM_CPU_KVCACHE_SPACE is set"):
        VllmEngine(config_for(str(tmp_path)))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    for name, value in engine_environment(config_for("")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=r"config\.json is not readable"):
        VllmEngine(config_for(str(tmp_path)))


def test_stop_strings_need_an_engine_with_a_tokenizer(tied: VllmEngine) -> None:
    with pytest.raises(DataError, match="started without a tokenizer"):
        tied.submit([request("texts", Sampling(max_tokens=1, stop_strings=("x",)))])


def test_the_death_of_the_engine_thread_reaches_every_caller(tied: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last of the module: the tied engine is dead afterwards."""
    from rljob_runtime.engine.vllm.loop import VllmLoop

    def die(self: VllmLoop) -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(VllmLoop, "step", die)
    tied.submit([endless("never", 0)])
    with pytest.raises(EngineDiedError, match="no more memory"):
        collected(tied, TIMEOUT_S)
    for call in (
        lambda: tied.submit([endless("later", 0)]),
        lambda: tied.score([(1, 2)], TIMEOUT_S),
        lambda: tied.abort(["never"]),
        lambda: tied.begin_update(manifest_of(weights(new_model(tied=True, seed=0))), 1),
        tied.version,
        tied.stats,
    ):
        with pytest.raises(EngineDiedError, match="no more memory"):
            call()
