"""Rules about ``components[].engine``: arguments that go to the engine under its own names, and those that RLJob sets itself.

Whether an engine knows an argument, and takes its value, is asked of its own parser when a run starts
(``rljob_runtime.engine.registry``); here are the conflicts, which no engine can know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.planning.environment import device_type, node_group
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import Engine, EngineType, Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.rljob import RLJobSpec

OWN_ARGUMENTS: Mapping[EngineType, Mapping[str, str]] = {
    EngineType.VLLM: {
        "model": "write spec.model.path",
        "tokenizer": "write spec.model.tokenizerPath",
        "trust_remote_code": "write spec.model.trustRemoteCode",
        "dtype": "write engine.dtype",
        "seed": "write spec.seed",
        "tensor_parallel_size": "write engine.tensorParallelSize",
        "pipeline_parallel_size": "write engine.pipelineParallelSize",
        "data_parallel_size": "place the component on more devices: each engine is a replica",
        "max_num_seqs": "write engine.maxRunningRequests",
        "kv_cache_memory_bytes": "write engine.kvCacheBytes",
        "gpu_memory_utilization": "write engine.memoryFraction",
        "enable_prefix_caching": "write engine.prefixCaching",
        "enforce_eager": "write engine.enforceEager",
        "enable_sleep_mode": "write spec.offload",
        "weight_transfer_config": "write spec.weightSync.backend",
        **dict.fromkeys(("enable_return_routed_experts", "aux_output_config"), "write spec.training.routerReplay"),
        **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank"), "write spec.weightSync.adapters"),
        **dict.fromkeys(("lora_dtype", "lora_target_modules"), "write spec.weightSync.adapters"),
        "load_format": "remove it",
        "skip_tokenizer_init": "remove it",
        "distributed_executor_backend": "remove it",
        "logprobs_mode": "remove it",
        "disable_log_stats": "remove it",
    },
    EngineType.SGLANG: {
        "model_path": "write spec.model.path",
        "tokenizer_path": "write spec.model.tokenizerPath",
        "trust_remote_code": "write spec.model.trustRemoteCode",
        "dtype": "write engine.dtype",
        "context_length": "write rollout.maxPromptTokens and maxResponseTokens",
        "tp_size": "write engine.tensorParallelSize",
        "tensor_parallel_size": "write engine.tensorParallelSize",
        "pp_size": "write engine.pipelineParallelSize",
        "dp_size": "place the component on more devices: each engine is a replica",
        "max_running_requests": "write engine.maxRunningRequests",
        "max_total_tokens": "write engine.kvCacheBytes",
        "mem_fraction_static": "write engine.memoryFraction",
        "disable_radix_cache": "write engine.prefixCaching",
        "disable_cuda_graph": "write engine.enforceEager",
        "enable_memory_saver": "write spec.offload",
        "enable_weights_cpu_backup": "write spec.offload",
        **dict.fromkeys(
            (
                *("host", "port", "api_key", "admin_api_key", "device", "load_format", "skip_tokenizer_init", "random_seed"),
                *("disable_overlap_schedule", "incremental_streaming_output", "stream_interval", "sampling_backend"),
                *("sampling_mask_max_tokens", "weight_version"),
            ),
            "remove it",
        ),
    },
}
"""Arguments of each engine that RLJob sets itself, and the field to use instead."""
_MOVES_EXPERTS = "rearranges experts at run time, so that weight updates would go to the wrong ones"
_MOVES_WEIGHTS = "keeps weights in host memory, which vLLM would copy over those of an update"
_KEEPS_CACHE = "keeps KV cache entries outside of the engine, which responses in progress would read again after an update of the weights"
UNSAFE_ARGUMENTS: Mapping[str, str] = {
    "enable_eplb": _MOVES_EXPERTS,
    **dict.fromkeys(("offload_backend", "offload_group_size"), _MOVES_WEIGHTS),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_size"), _KEEPS_CACHE),
}
"""vLLM's arguments with which engines would sample from other weights than the trainer's after an update (vLLM 0.32: ``routed_experts``,
``prefetch``, ``scheduler``; not every connector can be emptied, and none while it transfers)."""
HARMLESS_VALUES = ("auto", "uva")
"""Of ``offload_backend``: offloaded weights are read where updates write them."""


def _own_arguments(spec: RLJobSpec) -> Iterator[FieldError]:
    for path, engine in _engines(spec):
        own = OWN_ARGUMENTS.get(engine.type, {})
        for name, value in engine.extra_args.items():
            if name in own:
                yield _error(f"{path}.extraArgs.{name}", value, "is set by RLJob itself", own[name])
            elif engine.type is EngineType.VLLM and name in UNSAFE_ARGUMENTS and value and value not in HARMLESS_VALUES:
                yield _error(f"{path}.extraArgs.{name}", value, UNSAFE_ARGUMENTS[name], "remove it")


def _max_model_len(spec: RLJobSpec) -> Iterator[FieldError]:
    """A longer limit than a job's longest request costs nothing; a shorter one would cut responses where nothing says so."""
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    for path, engine in _engines(spec):
        value = engine.extra_args.get("max_model_len")
        if value is None or engine.type is not EngineType.VLLM:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            yield _error(f"{path}.extraArgs.max_model_len", value, "is not a number of tokens", "write a whole number, or remove it")
        elif value < longest:
            problem = f"is less than rollout.maxPromptTokens + maxResponseTokens ({longest}), so that responses would be cut earlier"
            yield _error(f"{path}.extraArgs.max_model_len", value, problem, "remove it, or lower those")


def _speculation(spec: RLJobSpec) -> Iterator[FieldError]:
    """vLLM refuses such requests of its HTTP server (``_validate_spec_decode``), and its sampler of drafted tokens has no min-p."""
    for path, engine in _engines(spec):
        speculates = engine.type is EngineType.VLLM and engine.extra_args.get("speculative_config") is not None
        if speculates and spec.rollout.min_p > 0:
            problem = f"samples without rollout.minP {spec.rollout.min_p:g}, which vLLM's speculative decoding does not have"
            yield _error(f"{path}.extraArgs.speculative_config", None, problem, "remove one of them; topK and topP can stay")


def _scheduling_ahead(spec: RLJobSpec, plan: Plan) -> Iterator[FieldError]:
    """On CPU vLLM sets ``async_scheduling`` to false, whatever is asked for."""
    for index, component in spec.with_role(Role.ROLLOUT):
        engine = component.engine
        if engine is None or engine.type is not EngineType.VLLM or not engine.extra_args.get("async_scheduling"):
            continue
        if any(device_type(node_group(spec, plan, process)) is DeviceType.CPU for process in plan.components[index].processes):
            path = f"spec.components[{index}].engine.extraArgs.async_scheduling"
            yield _error(path, True, "has no effect: on CPU devices vLLM does not schedule ahead", "remove it")


def _engines(spec: RLJobSpec) -> Iterator[tuple[str, Engine]]:
    for index, component in spec.with_role(Role.ROLLOUT):
        if component.engine is not None:
            yield f"spec.components[{index}].engine", component.engine


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_own_arguments, _max_model_len, _speculation)
"""Rules between fields, each independent of the others."""

PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (_scheduling_ahead,)
"""Rules that need to know where processes run."""
