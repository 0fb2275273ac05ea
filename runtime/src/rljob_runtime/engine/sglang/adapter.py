"""SGLang as the job knows it: from the spec to the settings of an engine. Imports nothing of SGLang, which has its own interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.dtypes import engine_dtype
from rljob_api.errors import FieldError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component, Engine
from rljob_runtime.engine.adapter import JudgeServer
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.residence import ENGINE_KINDS
from rljob_runtime.engine.sglang import arguments, interpreter
from rljob_runtime.errors import SetupError
from rljob_runtime.offload.states import StateKind

CPU_KV_CACHE_BYTES = 128 * 2**20
"""KV cache of an engine on CPU devices where the spec sets none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangAdapter:
    """See :class:`~rljob_runtime.engine.adapter.EngineAdapter`."""

    factory: str = "rljob_runtime.engine.sglang.engine:SglangEngine"
    concurrency: int = 4
    """Collecting, submitting, watching, and one call of a weight sync."""
    releases: frozenset[StateKind] = ENGINE_KINDS
    leaves_alone: bool = False
    spares_lost: bool = True
    judge_server: JudgeServer | None = None

    def lacking(self) -> str | None:
        """Where no interpreter has SGLang."""
        try:
            interpreter.sglang_python()
        except SetupError as exc:
            return str(exc)
        return None

    def config(self, spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, releases_devices: bool) -> EngineConfig:
        """Settings of one engine; one that releases its devices drops its weights, the next update brings them."""
        engine = component.engine or Engine()
        return EngineConfig(
            model_path=spec.model.path,
            tokenizer_path=spec.model.tokenizer_path,
            finds_texts=bool(spec.rollout.stop_strings),
            trust_remote_code=spec.model.trust_remote_code,
            dtype=engine_dtype(spec, engine).value,
            max_model_len=spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens,
            max_num_seqs=engine.max_running_requests,
            kv_cache_bytes=engine.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
            tensor_parallel_size=engine.tensor_parallel_size,
            gpu_memory_utilization=engine.memory_fraction,
            enforce_eager=engine.enforce_eager or on_cpu,
            enable_prefix_caching=engine.prefix_caching,
            threads=num_threads if on_cpu else None,
            start_timeout_s=spec.startup_deadline_seconds,
            release="discard" if releases_devices else "never",
            extra_args=dict(engine.extra_args),
            extra_args_path=f"spec.components[{[c.name for c in spec.components].index(component.name)}].engine.extraArgs",
        )

    def environment(self, config: EngineConfig) -> Mapping[str, str]:
        """Nothing: the server's variables are its own."""
        return {}

    def argument_problems(self, path: str, arguments_given: Mapping[str, Any]) -> Sequence[FieldError]:
        """What SGLang's own parser refuses."""
        return arguments.problems_in_child(path, arguments_given)


ADAPTER = SglangAdapter()
