"""vLLM through this project's adapter, in a process of its own: sleep, wake, and its log-probs beside the trainer's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.gpu_check.children import answer, context
from bench.gpu_check.lines import Line, at_most, equal, share
from bench.gpu_check.policy import folder_of, policy
from bench.gpu_check.scale import Scale
from bench.gpu_check.trainer import probe_lines, probe_tokens

CPU_CACHE_BYTES = 64 << 20


def check(scale: Scale) -> Iterator[Line]:
    """The smallest size: what leaves the device, how fast it comes back, the same answers afterwards, and the probe."""
    model = scale.models[0]
    tokens, lengths = probe_tokens(scale, int(model.config["vocab_size"]))
    with policy(model, scale, trainable=False, activation_checkpointing=False) as worker:
        trained = worker.compute_logprobs(tokens, lengths, 1.0)
    settings = {
        "model_path": str(folder_of(model, scale)),
        "dtype": scale.dtype,
        "max_model_len": 2 * int(lengths.max()),
        "max_num_seqs": 32,
        "release": "copy" if scale.on_cuda else "discard",
        "gpu_memory_utilization": 0.5,
        "kv_cache_bytes": None if scale.on_cuda else CPU_CACHE_BYTES,
        "threads": None if scale.on_cuda else 1,
    }
    ctx = context()
    results = ctx.Queue()
    arguments = (settings, [row.tolist() for row in np.split(tokens, np.cumsum(lengths)[:-1])], scale.on_cuda, scale.wait_s, results)
    found = answer(ctx, [(serve, arguments)], results, timeout_s=4 * scale.wait_s, what="engine")
    starts = np.cumsum(lengths) - lengths
    wanted = np.delete(trained, starts)
    yield Line(check="engine", what="start", value=found["start_s"], unit="s")
    what = "weights and cache" if scale.on_cuda else "cache (on CPU vLLM gives up nothing else)"
    yield at_most("engine", f"sleep, {what}", found["sleep_s"], "s", scale.speed(10.0))
    if scale.on_cuda:
        freed, held = found["freed_bytes"] / 2**30, found["held_bytes"] / 2**30
        yield share("engine", "freed by sleep", freed, "GiB", limit=held, limit_name="what it held", at_least=0.8)
    yield at_most("engine", f"wake, {what}", found["wake_s"], "s", scale.speed(10.0))
    yield equal("engine", "log-probs after waking up", float(np.abs(found["after"] - found["before"]).max()))
    yield from probe_lines("engine", wanted.astype(np.float32), found["after"], "vLLM against the trainer", dtype=scale.dtype)


def serve(settings: dict[str, Any], sequences: list[list[int]], on_cuda: bool, wait_s: float, results: Any) -> None:
    """In a process of its own: start, score, sleep, wake, score."""
    from rljob_runtime.engine.protocol import EngineConfig
    from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment
    from rljob_runtime.offload.states import StateKind

    config = EngineConfig(**settings)
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))  # before vLLM is imported

    from rljob_runtime.engine.vllm.engine import VllmEngine

    kinds = (StateKind.PARAMS, StateKind.KV_CACHE) if on_cuda else (StateKind.KV_CACHE,)
    started = time.perf_counter()
    engine = VllmEngine(config)
    start_s = time.perf_counter() - started
    given = [tuple(sequence) for sequence in sequences]
    try:
        before = np.concatenate([np.asarray(row, dtype=np.float32) for row in engine.score(given, wait_s)])
        held = engine.memory().allocated_bytes
        left = engine.offload(kinds, wait_s)
        came = engine.load(kinds, wait_s)
        after = np.concatenate([np.asarray(row, dtype=np.float32) for row in engine.score(given, wait_s)])
    finally:
        engine.shutdown()
    results.put(
        {
            "start_s": start_s,
            "sleep_s": left.elapsed_s,
            "wake_s": came.elapsed_s,
            "freed_bytes": sum(left.freed_bytes.values()),
            "held_bytes": held,
            "before": before,
            "after": after,
        }
    )
