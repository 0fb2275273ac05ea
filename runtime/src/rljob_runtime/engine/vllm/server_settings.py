"""From the spec to one engine of a Judge component: vLLM's server and the environment of its process. Imports no vLLM."""

from __future__ import annotations

from pathlib import Path

from rljob_api.dtypes import engine_dtype
from rljob_api.rules.judges import scores_by_class
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component, Engine
from rljob_runtime.engine.adapter import EngineWorker
from rljob_runtime.engine.vllm.environment import flashinfer_environment
from rljob_runtime.engine.vllm.server import ServerConfig

CPU_KV_CACHE_BYTES = 128 * 2**20
"""KV cache of an engine on CPU devices where the spec sets none."""
_FACTORY = "rljob_runtime.engine.vllm.server:VllmServer"


def vllm_server(
    spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, log_file: Path, releases_devices: bool = False
) -> EngineWorker:
    """The worker of one engine; ``log_file`` receives what the server prints, ``releases_devices`` lets it leave its devices."""
    engine, model = component.engine or Engine(), component.model
    if model is None:
        raise ValueError(f"{component.name} has no model; validation lets no such component through")
    config = ServerConfig(
        name=component.name,
        model_path=model.path,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
        dtype=engine_dtype(spec, engine).value,
        tensor_parallel_size=engine.tensor_parallel_size,
        pipeline_parallel_size=engine.pipeline_parallel_size,
        max_num_seqs=engine.max_running_requests,
        kv_cache_bytes=engine.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        memory_fraction=engine.memory_fraction,
        enable_prefix_caching=engine.prefix_caching,
        enforce_eager=engine.enforce_eager or on_cpu,
        seed=spec.seed,
        classifies=scores_by_class(spec, component.name),
        releases=releases_devices,
        on_cpu=on_cpu,
        extra_args=engine.extra_args,
        log_file=log_file,
    )
    env = {"VLLM_NO_USAGE_STATS": "1"} | flashinfer_environment()
    if on_cpu:  # threads are left unbound: several engines share the cores; nothing is compiled
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(num_threads), "TORCHDYNAMO_DISABLE": "1"}
    if on_cpu and engine.num_devices == 1:
        # Otherwise the engine has a process for its one worker, which imports all of vLLM again.
        env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if on_cpu and releases_devices:  # whose cache can be taken down and set up again
        env |= {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    return EngineWorker(factory=_FACTORY, kwargs={"config": config}, env=env, concurrency=1)
