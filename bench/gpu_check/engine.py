"""Engines through this project's adapters, each in a process of its own: sleep, wake, and their log-probs beside the trainer's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bench.gpu_check.children import Stage, answer, context
from bench.gpu_check.lines import Line, at_most, equal, share
from bench.gpu_check.policy import folder_of, policy
from bench.gpu_check.scale import Scale
from bench.gpu_check.trainer import probe_lines, probe_tokens
from rljob_runtime.errors import SetupError

if TYPE_CHECKING:
    from rljob_runtime.engine.protocol import Engine

CPU_CACHE_BYTES = 64 << 20


def check(scale: Scale) -> Iterator[Line]:
    """vLLM; on CPU it gives up its cache only."""
    yield from _check(scale, "engine", "vLLM", serve_vllm, ("kv_cache", "params") if scale.on_cuda else ("kv_cache",))


def check_sglang(scale: Scale) -> Iterator[Line]:
    """SGLang, where an interpreter has it; weights and cache leave CPU devices too."""
    from rljob_runtime.engine.sglang.interpreter import sglang_python

    try:
        sglang_python()
    except SetupError as error:
        yield Line(check="sglang", what="skipped", skipped=str(error))
        return
    yield from _check(scale, "sglang", "SGLang", serve_sglang, ("kv_cache", "params"))


def _check(scale: Scale, name: str, engine: str, serve: Callable[..., None], kinds: Sequence[str]) -> Iterator[Line]:
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
        "release": "copy" if "params" in kinds else "discard",
        "gpu_memory_utilization": 0.5,
        "kv_cache_bytes": None if scale.on_cuda else CPU_CACHE_BYTES,
        "threads": None if scale.on_cuda else 1,
        "start_timeout_s": 4 * scale.wait_s,
    }
    ctx = context()
    results = ctx.Queue()
    arguments = (settings, [row.tolist() for row in np.split(tokens, np.cumsum(lengths)[:-1])], kinds, scale.wait_s, results)
    found = answer(ctx, [(serve, arguments)], results, timeout_s=4 * scale.wait_s, what=name, begin=scale.begin)
    starts = np.cumsum(lengths) - lengths
    wanted = np.delete(trained, starts)
    yield Line(check=name, what="start", value=found["start_s"], unit="s")
    what = "weights and cache" if "params" in kinds else f"cache (on CPU {engine} gives up nothing else)"
    yield at_most(name, f"sleep, {what}", found["sleep_s"], "s", scale.speed(10.0))
    if scale.on_cuda:
        freed, held = found["freed_bytes"] / 2**30, found["held_bytes"] / 2**30
        yield share(name, "freed by sleep", freed, "GiB", limit=held, limit_name="what it held", at_least=0.8)
        yield share(
            name, "freed on the device", found["device_freed_bytes"] / 2**30, "GiB", limit=held, limit_name="what it held", at_least=0.8
        )
    yield at_most(name, f"wake, {what}", found["wake_s"], "s", scale.speed(10.0))
    yield equal(name, "log-probs after waking up", float(np.abs(found["after"] - found["before"]).max()))
    yield from probe_lines(name, wanted.astype(np.float32), found["after"], f"{engine} against the trainer", dtype=scale.dtype)


def serve_vllm(settings: dict[str, Any], sequences: list[list[int]], kinds: Sequence[str], wait_s: float, results: Any) -> None:
    """In a process of its own."""
    from rljob_runtime.engine.protocol import EngineConfig
    from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment

    config = EngineConfig(**settings)
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))  # before vLLM is imported

    from rljob_runtime.engine.vllm.engine import VllmEngine

    _serve(lambda: VllmEngine(config), sequences, kinds, wait_s, results)


def serve_sglang(settings: dict[str, Any], sequences: list[list[int]], kinds: Sequence[str], wait_s: float, results: Any) -> None:
    """In a process of its own, and SGLang's server in further ones."""
    from rljob_runtime.engine.protocol import EngineConfig
    from rljob_runtime.engine.sglang.engine import SglangEngine

    _serve(lambda: SglangEngine(EngineConfig(**settings)), sequences, kinds, wait_s, results)


def _serve(start: Callable[[], Engine], sequences: list[list[int]], kinds: Sequence[str], wait_s: float, results: Any) -> None:
    """Start, score, sleep, wake, score."""
    from rljob_runtime.offload.states import StateKind

    given = [tuple(sequence) for sequence in sequences]
    states = [StateKind(kind) for kind in kinds]
    started = time.perf_counter()
    results.put(Stage("start of the engine"))
    engine = start()
    start_s = time.perf_counter() - started
    try:
        results.put(Stage("log-probs, sleep, and wake"))
        before = np.concatenate([np.asarray(row, dtype=np.float32) for row in engine.score(given, wait_s)])
        held = engine.memory().allocated_bytes
        full = _free_bytes()
        left = engine.offload(states, wait_s)
        freed = _free_bytes() - full
        came = engine.load(states, wait_s)
        after = np.concatenate([np.asarray(row, dtype=np.float32) for row in engine.score(given, wait_s)])
    finally:
        engine.shutdown()
    results.put(
        {
            "start_s": start_s,
            "sleep_s": left.elapsed_s,
            "wake_s": came.elapsed_s,
            "freed_bytes": sum(left.freed_bytes.values()),
            "device_freed_bytes": freed,
            "held_bytes": held,
            "before": before,
            "after": after,
        }
    )


def _free_bytes() -> int:
    """Of the device, as its driver counts, whatever process holds the rest; 0 without one."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
