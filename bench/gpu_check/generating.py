"""vLLM with settings that a job passes through ``engine.extraArgs``: what it samples, beside the trainer's log-probs of the same tokens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.gpu_check.children import Stage, answer, context
from bench.gpu_check.lines import Line, at_most, equal, share
from bench.gpu_check.policy import folder_of, policy
from bench.gpu_check.scale import Model, Scale
from bench.gpu_check.trainer import probe_lines
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.weightsync.probe import default_limits

if TYPE_CHECKING:
    from rljob_runtime.engine.protocol import Engine

SAMPLES = 4
"""Of each prompt."""
PATTERN = 6
"""Tokens of a prompt that repeat."""
FEW_TOKENS = 8
"""Vocabulary where tokens are drafted: with random weights and all of Qwen2.5's 151,936, hardly a draft is accepted."""
LEAST_ACCEPTED = 0.02
"""Of drafted tokens: with random weights the first of four is accepted once in eight times, none behind a rejected one, 3.6 % in all."""
CACHE_BYTES = 4 << 30
CPU_CACHE_BYTES = 64 << 20
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "ngram": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    },
    "async": {"async_scheduling": True},
}
"""``extraArgs``."""
NOT_ON_CPU = {
    "fp8": "vLLM computes in fp8 on GPUs only",
    "async": "vLLM does not schedule ahead on a CPU",
}
FEW_WRONG = 0.001
FP8_MEAN, FP8_TAIL = 0.2, 0.6
"""Nats: weights of 8 bits are another policy, whose distance truncated importance sampling corrects."""


def check_plain(scale: Scale) -> Iterator[Line]:
    """Without any of them: what the others stand beside."""
    yield from _check("plain", scale)


def check_fp8(scale: Scale) -> Iterator[Line]:
    """Weights and activations in 8 bits."""
    yield from _check("fp8", scale)


def check_ngram(scale: Scale) -> Iterator[Line]:
    """Speculation from the sequence's own earlier tokens."""
    yield from _check("ngram", scale)


def check_async(scale: Scale) -> Iterator[Line]:
    """A step is scheduled while the one before it is computed."""
    yield from _check("async", scale)


def _check(variant: str, scale: Scale) -> Iterator[Line]:
    """The lines of one variant."""
    name = f"engine-{variant}"
    if not scale.on_cuda and (reason := NOT_ON_CPU.get(variant)):
        yield Line(check=name, what="skipped", skipped=reason)
    else:
        yield from _variant(name, variant, scale)


def _variant(name: str, variant: str, scale: Scale) -> Iterator[Line]:
    model = _with_few_tokens(scale.models[0]) if variant == "ngram" else scale.models[0]
    settings = {
        "model_path": str(folder_of(model, scale)),
        "dtype": scale.dtype,
        "max_model_len": scale.sampled_prompt + scale.sampled_tokens + 16,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.5,
        "kv_cache_bytes": CACHE_BYTES if scale.on_cuda else CPU_CACHE_BYTES,
        "threads": None if scale.on_cuda else 1,
        "start_timeout_s": 4 * scale.wait_s,
        "extra_args": VARIANTS[variant],
    }
    prompts = repetitive_prompts(scale, int(model.config["vocab_size"]))
    ctx = context()
    results = ctx.Queue()
    arguments = (settings, prompts, scale.sampled_tokens, scale.bucket_bytes, scale.wait_s, results)
    found = answer(ctx, [(serve, arguments)], results, timeout_s=4 * scale.wait_s, what=name, begin=scale.begin)
    yield Line(check=name, what="start", value=found["start_s"], unit="s")
    yield from _speed(name, variant, found, scale)
    if variant == "ngram":
        yield _accepted(name, found)
    tokens, lengths, wanted = _joined(prompts, found["tokens"])
    with policy(model, scale, trainable=False, activation_checkpointing=False) as worker:
        trained = worker.compute_logprobs(tokens, lengths, 1.0, wanted)[wanted > 0]
    sampled = np.concatenate(found["logprobs"])
    what = f"vLLM {variant} against the trainer, as sampled"
    if variant == "fp8":
        apart = np.abs(sampled - trained)
        note = "truncated importance sampling corrects it"
        yield at_most(name, f"mean difference, {what}", float(apart.mean()), "nats", FP8_MEAN, note=note)
        yield at_most(name, f"95th percentile, {what}", float(np.percentile(apart, 95)), "nats", FP8_TAIL)
    else:
        yield from probe_lines(name, trained, sampled, what, dtype=scale.dtype)
        _, tail = default_limits([scale.dtype])
        wrong = float((np.abs(sampled - trained) > tail).mean())  # means are clipped, and a few wrong ones hide in a percentile
        yield at_most(name, f"tokens further apart than {tail:g} nats", wrong, "of all", FEW_WRONG)
    if "fault" in found:
        yield Line(check=name, what="update", failed=found["fault"])
    else:
        yield equal(name, "log-probs after an update with the weights that it had", found["moved"])


def _with_few_tokens(model: Model) -> Model:
    """The same layers over a small vocabulary, of which no token ends a response."""
    return replace(
        model, name=f"{model.name} with {FEW_TOKENS} tokens", config={**model.config, "vocab_size": FEW_TOKENS, "eos_token_id": None}
    )


def _accepted(name: str, found: Mapping[str, Any]) -> Line:
    """Whether there is something of drafts among the log-probs that are compared."""
    accepted, drafted = found["accepted"], found["drafted"]
    what = "drafted tokens that were accepted, among those compared below"
    return share(name, what, accepted, "tokens", limit=drafted, limit_name="drafted", at_least=LEAST_ACCEPTED)


def _speed(name: str, variant: str, found: Mapping[str, Any], scale: Scale) -> Iterator[Line]:
    count = sum(map(len, found["tokens"]))
    rate, plain = count / found["seconds"], scale.found.get("engine tokens/s")
    if variant == "plain":
        scale.found["engine tokens/s"] = rate
    beside: dict[str, Any] = {} if plain is None else {"limit": plain, "limit_name": "plain vLLM", "compared": rate / plain}
    what = f"generation, {len(found['tokens'])} samples"
    yield Line(check=name, what=what, value=rate, unit="tokens/s", note=f"{count} tokens in {found['steps']} steps", **beside)


def repetitive_prompts(scale: Scale, vocab_size: int) -> list[list[int]]:
    """Few random tokens again and again, so that there is something to look up."""
    random = np.random.default_rng(5)
    patterns = random.integers(2, vocab_size, size=(scale.sampled_prompts, PATTERN))
    return [np.resize(pattern, scale.sampled_prompt).tolist() for pattern in patterns]


def _joined(prompts: Sequence[Sequence[int]], responses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens (T,) of prompts and responses, lengths (S,), and 1 at the responses' tokens (T,)."""
    rows, wanted = [], []
    for index, response in enumerate(responses):
        prompt = prompts[index // SAMPLES]
        rows.append(np.concatenate([np.array(prompt, dtype=np.int32), response.astype(np.int32)]))
        wanted.append(np.concatenate([np.zeros(len(prompt), np.float32), np.ones(response.size, np.float32)]))
    return np.concatenate(rows), np.array([row.size for row in rows], dtype=np.int32), np.concatenate(wanted)


def serve(settings: Mapping[str, Any], prompts: list[list[int]], tokens: int, bucket_bytes: int, wait_s: float, results: Any) -> None:
    """In a process of its own: sample twice, of which the second time counts, and update with the same weights."""
    from rljob_runtime.engine.protocol import EngineConfig
    from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment

    config = EngineConfig(**settings)
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))  # before vLLM is imported

    from rljob_runtime.engine.vllm.engine import VllmEngine

    results.put(Stage("start of the engine"))
    started = time.perf_counter()
    engine = VllmEngine(config)
    found: dict[str, Any] = {"start_s": time.perf_counter() - started}
    try:
        results.put(Stage("sampling"))
        _sampled(engine, prompts, tokens, 0, wait_s)
        found |= _sampled(engine, prompts, tokens, 1, wait_s)
        scored = [tuple(prompt) for prompt in prompts]
        try:
            results.put(Stage("update with the same weights"))
            before = engine.score(scored, wait_s)
            _update(engine, Path(config.model_path), bucket_bytes, wait_s)
            after = engine.score(scored, wait_s)
            found["moved"] = float(max(np.abs(np.subtract(a, b)).max() for a, b in zip(before, after, strict=True)))
        except RuntimeFault as error:  # what was sampled counts all the same
            found["fault"] = f"an update with the same weights: {type(error).__name__}: {error}"
    finally:
        engine.shutdown()
    results.put(found)


def _sampled(engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, turn: int, wait_s: float) -> dict[str, Any]:
    """Responses by prompt and sample, with their log-probs; seconds and steps that they took."""
    from rljob_runtime.packed import unpack
    from rljob_runtime.records import GenerationRequest, Sampling

    sampling = Sampling(max_tokens=tokens, temperature=1.0)
    requests = [
        GenerationRequest(
            request_id=f"{turn}-{index}", prompt_token_ids=np.array(prompts[index // SAMPLES], np.int32), sampling=sampling, seed=index
        )
        for index in range(SAMPLES * len(prompts))
    ]
    before = engine.stats()
    started = time.perf_counter()
    engine.submit(requests)
    found: dict[str, Any] = {}
    while len(found) < len(requests):
        for completion in unpack(engine.collect(1.0)):
            found[completion.request_id] = completion.segment
        if time.perf_counter() - started > wait_s:
            raise TimeoutError(f"{len(found)} of {len(requests)} responses after {wait_s:.0f} s")
    seconds = time.perf_counter() - started
    segments = [found[request.request_id] for request in requests]
    stats = engine.stats()
    return {
        "seconds": seconds,
        "steps": int(stats["steps"] - before["steps"]),
        "drafted": stats["drafted_tokens"] - before["drafted_tokens"],
        "accepted": stats["accepted_tokens"] - before["accepted_tokens"],
        "tokens": [np.array(segment.token_ids) for segment in segments],
        "logprobs": [np.array(segment.logprobs) for segment in segments],
    }


def _update(engine: Engine, folder: Path, bucket_bytes: int, wait_s: float) -> None:
    """Bring the weights of the model's folder, as the object store would."""
    from safetensors.torch import load_file

    from rljob_runtime.weightsync.packing import pack, plan_buckets
    from rljob_runtime.weightsync.parcel import sealed

    tensors = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    specs = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()]
    manifest = plan_buckets(specs, bucket_bytes)
    parts: list[Any] = []
    for bucket in manifest.buckets:
        data = np.zeros(bucket.size_bytes, dtype=np.uint8)
        pack(bucket, {slot.name: tensors[slot.name] for slot in bucket.slots}, data)
        parts.append(sealed(1, data))
    engine.update(manifest, 1, wait_s, "recompute", *parts)
