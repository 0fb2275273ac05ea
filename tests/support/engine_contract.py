"""What every engine does, asked of a real one and compared with transformers token by token.

A test module of an engine derives :class:`EngineContract` and has a fixture ``engine``: the untied model of seed 0, served under a version
of its own, with a tokenizer of :func:`letters`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rljob_runtime.engine.protocol import Engine, EngineConfig
from rljob_runtime.errors import DataError, DeadlineError, WeightSyncError
from rljob_runtime.records import Bucket, Completion, GenerationRequest, Sampling, VersionSpan, WeightManifest
from rljob_runtime.weightsync.packing import pack, plan_buckets
from tests.support.pace import HANG_S
from tests.support.records import collected, ids, tokens

AnyEngine = TypeVar("AnyEngine", bound=Engine)
VOCAB = 60
EOS = 2
MAX_LEN = 512
TIMEOUT_S = HANG_S
TOLERANCE = 1e-4


def new_model(*, tied: bool, seed: int) -> Qwen2ForCausalLM:
    """Random two-layer Qwen2; weights large enough that distributions are far from uniform. Only the tied one knows an end token.

    From a generator of its own: the engine's thread samples from torch's global one while a test makes a model.
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


def weights(model: Qwen2ForCausalLM) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def manifest_of(tensors: dict[str, torch.Tensor], bucket_bytes: int = 100_000) -> WeightManifest:
    return plan_buckets([(name, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()], bucket_bytes)


def packed(bucket: Bucket, tensors: dict[str, torch.Tensor]) -> np.ndarray:
    out = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, tensors, out)
    return out


def push(engine: Engine, model: Qwen2ForCausalLM, version: int, on_running: str = "recompute") -> None:
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


def all_logprobs(model: Qwen2ForCausalLM, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Row i: log-probs of the token after position i."""
    with torch.no_grad():
        return (model(torch.tensor([list(token_ids)])).logits[0] / temperature).log_softmax(-1)


def expected_scores(model: Qwen2ForCausalLM, token_ids: Sequence[int]) -> list[float]:
    rows = all_logprobs(model, token_ids)
    return [rows[i, token].item() for i, token in enumerate(token_ids[1:])]


def expected_logprobs(model: Qwen2ForCausalLM, prompt: Sequence[int], sampling: Sampling, response: Sequence[int]) -> list[float]:
    """What transformers gives for a sampled response after temperature, top-k, min-p and top-p."""
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


def drain(engine: Engine, count: int) -> dict[str, Completion]:
    found: dict[str, Completion] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} responses"
        found |= {completion.request_id: completion for completion in collected(engine, 1.0)}
    return found


def generate(engine: Engine, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
    engine.submit(requests)
    return drain(engine, len(requests))


def wait_for_tokens(engine: Engine, count: int) -> None:
    """Until the engine sampled ``count`` more tokens than when called."""
    goal = engine.stats()["generated_tokens"] + count
    deadline = time.monotonic() + TIMEOUT_S
    while engine.stats()["generated_tokens"] < goal:
        assert time.monotonic() < deadline
        assert collected(engine, 0.001) == []


COLD = 0.01
"""The temperature nearest to greedy that engines take: the likeliest token is sampled."""
LONG = Sampling(max_tokens=300)
"""Long enough to still run when the test acts on it: the untied model has no end-of-sequence token."""


def endless(name: str, seed: int = 0) -> GenerationRequest:
    return request(name, LONG, seed)


def until_done(engine: Engine, work: Future[None]) -> list[Completion]:
    """What ends meanwhile."""
    found: list[Completion] = []
    while not work.done():
        found += collected(engine, 0.001)
    return found


def check_scores_after_updates(engine: AnyEngine, *, tied: bool, bring: Callable[[AnyEngine, Qwen2ForCausalLM, int], None] = push) -> None:
    """``bring(engine, model, version)`` is the update."""
    probes = [(5, 17, 33, 8, 9, 10), (4, 4), tuple(range(1, 59)) * 6]
    for seed in (11, 12):
        model = new_model(tied=tied, seed=seed)
        before = engine.score(probes, TIMEOUT_S)
        bring(engine, model, engine.version() + 1)
        after = engine.score(probes, TIMEOUT_S)
        for probe, old, new in zip(probes, before, after, strict=True):
            assert new == pytest.approx(expected_scores(model, probe), abs=TOLERANCE)
            assert max(abs(a - b) for a, b in zip(old, new, strict=True)) > 0.1


class EngineContract:
    """Tests of one engine."""

    stops_at_once = True
    """Whether nothing is sampled behind a stop string."""

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
    def test_logprobs_are_those_of_the_distribution_sampled_from(self, engine: Engine, sampling: Sampling) -> None:
        model = new_model(tied=False, seed=0)
        found = generate(engine, [request(f"r{seed}", sampling, seed) for seed in range(6)])
        for completion in found.values():
            behavior = replace(sampling, temperature=sampling.temperature or 1.0)
            expected = expected_logprobs(model, (5, 17, 33, 8), behavior, tokens(completion))
            assert completion.segment.logprobs == pytest.approx(expected, abs=TOLERANCE)
            assert completion.segment.version_spans == (VersionSpan(start=0, end=len(tokens(completion)), version=engine.version()),)
            if sampling.temperature == 0:
                greedy = all_logprobs(model, [5, 17, 33, 8, *tokens(completion)]).argmax(-1)[3:-1]
                assert tokens(completion) == tuple(greedy.tolist())
            assert (completion.finish_reason, len(tokens(completion))) == ("length", 12)

    @pytest.mark.parametrize("left", [12, 6, 1])
    def test_a_response_fills_what_a_prompt_leaves(self, engine: Engine, left: int) -> None:
        """Episodes and continued responses come to the end of the longest sequence token by token."""
        prompt = tuple(3 + place % 50 for place in range(MAX_LEN - left))
        done = generate(engine, [request("long", Sampling(max_tokens=left), 0, prompt)])["long"]
        assert (len(done.segment), done.finish_reason) == (left, "length")

    def test_stop_tokens_end_a_response_and_stay_in_it(self, engine: Engine) -> None:
        free = tokens(generate(engine, [request("free", Sampling(max_tokens=12, temperature=0.0))])["free"])
        stop = free[5]
        stopped = generate(engine, [request("stopped", Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(stop,)))])["stopped"]
        assert tokens(stopped) == free[: free.index(stop) + 1]
        assert stopped.finish_reason == "stop"

    def test_a_response_ends_with_the_token_that_completes_a_stop_string(self, engine: Engine) -> None:
        """Also where the string began on another engine; nothing behind it is sampled, and what comes before is as it was."""
        free = generate(engine, [request("free", Sampling(max_tokens=12, temperature=COLD, top_k=8, returns_mask=True), 3)])["free"]
        text = "".join(chr(ord("0") + token) for token in tokens(free))
        sampling = Sampling(max_tokens=12, temperature=COLD, top_k=8, returns_mask=True, stop_strings=("never", text[4:7]))
        before = engine.stats()["generated_tokens"]
        stopped = generate(engine, [request("stopped", sampling, 3)])["stopped"]
        end = text.index(text[4:7]) + 3  # the same tokens: nearly greedy
        assert (tokens(stopped), stopped.finish_reason) == (tokens(free)[:end], "stop")
        if self.stops_at_once:
            assert engine.stats()["generated_tokens"] - before == end
        assert stopped.segment.logprobs == pytest.approx(free.segment.logprobs[:end], abs=TOLERANCE)
        assert stopped.segment.sampling_mask is not None
        assert stopped.segment.sampling_mask.counts.size == end
        assert stopped.segment.version_spans == (VersionSpan(start=0, end=end, version=engine.version()),)
        begun = (5, 17, 33, 8, *tokens(free)[: end - 1])
        greedy = tokens(generate(engine, [request("greedy", Sampling(max_tokens=1, temperature=0.0), prompt=begun)])["greedy"])
        stops = (text[end - 3 : end - 1] + chr(ord("0") + greedy[0]),)
        later = replace(
            request("later", Sampling(max_tokens=5, temperature=0.0, stop_strings=stops), prompt=begun), num_sampled_before=end - 1
        )
        found = generate(engine, [later])["later"]
        assert (tokens(found), found.finish_reason) == (greedy, "stop")

    def test_an_update_in_flight_recomputes_and_marks_spans(self, engine: Engine) -> None:
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

    def test_responses_are_collected_while_an_update_is_under_way(self, engine: Engine) -> None:
        engine.submit([endless(f"r{i}", i) for i in range(8)])
        wait_for_tokens(engine, 80)
        with ThreadPoolExecutor(1) as pool:
            pushing = pool.submit(push, engine, new_model(tied=False, seed=5), engine.version() + 1)
            found = {completion.request_id for completion in until_done(engine, pushing)}
        pushing.result()
        assert found | drain(engine, 8 - len(found)).keys() == {f"r{i}" for i in range(8)}

    def test_a_skipped_tensor_or_other_shape_is_refused_by_name(self, engine: Engine) -> None:
        tensors = weights(new_model(tied=False, seed=1))
        short = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up_proj" not in name}
        with pytest.raises(WeightSyncError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
            engine.begin_update(manifest_of(short), 5)
        with pytest.raises(WeightSyncError, match=r"not in the engine's model: extra"):
            engine.begin_update(manifest_of(tensors | {"extra": torch.zeros(1)}), 5)
        with pytest.raises(WeightSyncError, match=r"model\.norm\.weight \(65,\) instead of \(64,\)"):
            engine.begin_update(manifest_of(tensors | {"model.norm.weight": torch.zeros(65)}), 5)

    def test_missing_repeated_and_wrong_buckets_are_refused_and_old_weights_stay(self, engine: Engine) -> None:
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
        assert engine.score([(5, 6, 7, 8)], TIMEOUT_S)[0] == pytest.approx(before[0], abs=TOLERANCE)

    def test_abort_returns_what_was_generated(self, engine: Engine) -> None:
        greedy = replace(LONG, temperature=0.0)
        whole = generate(engine, [request("whole", greedy)])["whole"]
        engine.submit([request("cut", greedy), request("short", Sampling(max_tokens=2), 5)])
        assert drain(engine, 1).keys() == {"short"}
        engine.abort(["cut", "unknown", "short"])
        cut = drain(engine, 1)["cut"]
        assert cut.finish_reason == "abort"
        assert 2 <= len(tokens(cut)) < 300
        assert tokens(cut) == tokens(whole)[: len(tokens(cut))]
        assert len(cut.segment.logprobs) == len(tokens(cut)) == cut.segment.version_spans[-1].end
        assert engine.stats()["running"] == 0

    def test_a_cleared_engine_has_forgotten_everything_and_takes_the_same_requests_again(self, engine: Engine) -> None:
        engine.submit([endless("one"), endless("other")])
        wait_for_tokens(engine, 1)
        engine.clear(TIMEOUT_S)
        assert collected(engine, 0.001) == []
        again = generate(engine, [request(name, Sampling(max_tokens=2)) for name in ("one", "other")])
        assert [len(tokens(again[name])) for name in ("one", "other")] == [2, 2]

    def test_scoring_runs_beside_generation_and_has_a_deadline(self, engine: Engine) -> None:
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
    def test_unservable_requests_are_refused_at_the_door(self, engine: Engine, change: dict[str, object], message: str) -> None:
        with pytest.raises(DataError, match=message):
            engine.submit([request("good", Sampling(max_tokens=1)), replace(request("bad", Sampling(max_tokens=1)), **change)])
        assert generate(engine, [request("good", Sampling(max_tokens=1))]).keys() == {"good"}

    def test_after_an_update_scores_are_those_of_the_new_weights(self, engine: Engine) -> None:
        check_scores_after_updates(engine, tied=False)
