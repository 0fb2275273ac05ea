"""The environment of a process that runs vLLM; must be in place before vLLM (or torch) is imported.

The one place in the runtime that knows these names. The actor's definition passes ``engine_environment`` to the process, or the
process calls ``apply_environment`` first thing.
"""

from __future__ import annotations

import os

from rljob_runtime.engine.protocol import EngineConfig

ENVIRONMENT_TO_UNSET = ("VLLM_CPU_KVCACHE_SPACE",)
"""It would override ``kv_cache_bytes`` and touch every page of it at once."""


def flashinfer_environment() -> dict[str, str]:
    """Turn off what vLLM by default compiles at first use, and the images have no nvcc for: FlashInfer's sampler and its all-reduce."""
    return {name: os.environ.get(name, "0") for name in ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER")}


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Variables to set, besides ``ENVIRONMENT_TO_UNSET`` which must not be set.

    The engine core runs in the process itself (the engine's thread owns it and changes weights between two steps), threads are left
    unbound (several engines may share the cores), nothing reaches the network.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    } | flashinfer_environment()  # requests have seeds, which FlashInfer's sampler cannot use
    if config.enforce_eager:
        # vLLM compiles a small sampling helper even then, which needs a C++ compiler in the image and seconds at the start.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.threads is not None:
        variables["OMP_NUM_THREADS"] = str(config.threads)
    return variables


def apply_environment(config: EngineConfig) -> None:
    """Make this process fit for an engine; call before anything imports vLLM."""
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))


def environment_problems(config: EngineConfig) -> list[str]:
    """What of the environment would make the engine misbehave, one line each; empty when fit."""
    problems = [f"{name} is set to {os.environ[name]!r}, must be unset" for name in ENVIRONMENT_TO_UNSET if name in os.environ]
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND"):
        wanted = engine_environment(config)[name]
        if os.environ.get(name) != wanted:
            problems.append(f"{name} is {os.environ.get(name)!r}, must be {wanted!r}")
    return problems
