"""vLLM as the job knows it: from the spec to the settings and the environment of an engine's process. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.adapters import padded_rank, serves_adapters
from rljob_api.dtypes import engine_dtype
from rljob_api.errors import FieldError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component, Engine
from rljob_api.vocabulary import RouterReplay
from rljob_runtime.engine.adapter import JudgeServer, missing_package
from rljob_runtime.engine.protocol import EngineConfig, ServedAdapters
from rljob_runtime.engine.residence import ENGINE_KINDS
from rljob_runtime.engine.vllm import arguments, environment
from rljob_runtime.engine.vllm.server_settings import CPU_KV_CACHE_BYTES, vllm_server
from rljob_runtime.offload.states import StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmAdapter:
    """See :class:`~rljob_runtime.engine.adapter.EngineAdapter`."""

    factory: str = "rljob_runtime.engine.vllm.engine:VllmEngine"
    concurrency: int = 4
    """Collecting, submitting, watching, and one call of a weight sync."""
    releases: frozenset[StateKind] = ENGINE_KINDS
    leaves_alone: bool = True
    spares_lost: bool = True
    judge_server: JudgeServer | None = vllm_server

    def lacking(self) -> str | None:
        """Where vLLM is not installed."""
        return missing_package("vllm", "install rljob-runtime[cpu] or rljob-runtime[gpu]")

    def config(self, spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, releases_devices: bool) -> EngineConfig:
        """Settings of one engine; an engine that releases its devices drops its weights, the next update brings them."""
        engine = component.engine or Engine()
        passed = dict(engine.extra_args)
        longest = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
        return EngineConfig(
            model_path=spec.model.path,
            tokenizer_path=spec.model.tokenizer_path,
            finds_texts=bool(spec.rollout.stop_strings),
            trust_remote_code=spec.model.trust_remote_code,
            dtype=engine_dtype(spec, engine).value,
            max_model_len=max(int(passed.pop("max_model_len", longest)), longest),
            max_num_seqs=engine.max_running_requests,
            kv_cache_bytes=engine.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            gpu_memory_utilization=engine.memory_fraction,
            enforce_eager=engine.enforce_eager or on_cpu,
            enable_prefix_caching=engine.prefix_caching,
            seed=spec.seed,
            threads=num_threads if on_cpu else None,
            start_timeout_s=spec.startup_deadline_seconds,
            adapters=_served(spec),
            returns_routes=spec.training.router_replay is RouterReplay.ENGINE,
            release="discard" if releases_devices else "never",
            extra_args=passed,
            extra_args_path=f"spec.components[{[c.name for c in spec.components].index(component.name)}].engine.extraArgs",
        )

    def environment(self, config: EngineConfig) -> Mapping[str, str]:
        """Variables of the engine's process."""
        return environment.engine_environment(config)

    def argument_problems(self, path: str, arguments_given: Mapping[str, Any]) -> Sequence[FieldError]:
        """What vLLM's own parser refuses, asked in a child process: importing vLLM changes the process that does it."""
        return arguments.problems_in_child(path, arguments_given)


def _served(spec: RLJobSpec) -> ServedAdapters | None:
    """Adapters that engines of the job serve."""
    lora = spec.model.lora
    if lora is None or not serves_adapters(spec):
        return None
    return ServedAdapters(rank=lora.rank, slot_rank=padded_rank(lora.rank), target_modules=lora.target_modules)


ADAPTER = VllmAdapter()
