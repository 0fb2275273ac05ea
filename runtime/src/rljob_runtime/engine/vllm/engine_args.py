"""Settings of an engine in vLLM's form."""

from __future__ import annotations

from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from rljob_runtime.engine.expected_parameters import expected_parameters
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm import weight_receiver
from rljob_runtime.engine.vllm.sampling import MAX_LISTED
from rljob_runtime.errors import ModelError
from rljob_runtime.weightsync.adapters import linear_layers

CPU_BATCHED_TOKENS = 8192
"""Tokens of one step on CPU, where a step holds whole prompts."""
CPU_BLOCK_TOKENS = 128
"""Of one block of keys and values: vLLM's default on CPU."""


def engine_args(config: EngineConfig) -> EngineArgs:
    """The vLLM form of the config.

    ``processed_logprobs`` are those of the very distribution that tokens are sampled from. Scheduling ahead (``async_scheduling``) is off
    unless it is asked for: it has run on one GPU only. An update waits for the step under way then, as for pipeline stages. On CPU prompts
    are computed whole: vLLM 0.32 rewinds the random generator of a seeded request whose prompt it has computed in part, which torch's CPU
    generator does not support.
    """
    on_cpu = current_platform.is_cpu()
    if on_cpu and config.release == "copy":
        raise ModelError("release 'copy' needs vLLM's sleep mode, which CPU does not have; use 'discard' or 'never'")
    if on_cpu and config.returns_routes and config.num_processes > 1:
        raise ModelError("returns_routes of a model in several processes: on CPU routes are read in the engine's own process; use one")
    if on_cpu and config.extra_args.get("enable_chunked_prefill"):
        raise ModelError(f"{config.extra_args_path}.enable_chunked_prefill: true: on CPU prompts are computed whole; remove it")
    own: dict[str, Any] = {
        "model": config.model_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "seed": config.seed,
        "load_format": config.load_format,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_batched_tokens or (max(CPU_BATCHED_TOKENS, config.max_model_len) if on_cpu else None),
        "enable_chunked_prefill": not on_cpu,
        "kv_cache_memory_bytes": config.kv_cache_bytes,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        # Inside an actor vLLM would start Ray actors of its own for the other ranks, outside the plan.
        "distributed_executor_backend": "mp" if config.num_processes > 1 else None,
        "enable_prefix_caching": config.enable_prefix_caching and not (on_cpu and (config.returns_routes or _fits_a_block(config))),
        "enforce_eager": config.enforce_eager,
        "enable_return_routed_experts": config.returns_routes and not on_cpu,  # on CPU StepRoutes reads them
        "async_scheduling": False,
        "enable_sleep_mode": not on_cpu and config.release != "never",
        # Of a draft model, which no update brings; without one the pattern matches nothing.
        "sleep_preserve_parameter_names": ["draft.*"] if not on_cpu and config.release == "discard" else [],
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LISTED,
        "weight_transfer_config": WeightTransferConfig(backend=weight_receiver.BACKEND),
        "disable_log_stats": True,
        "per_request_spec_decode_metrics": "summary" if config.extra_args.get("speculative_config") else "none",
        **_adapter_args(config),
    }
    return EngineArgs(**(own | dict(config.extra_args)))


def _fits_a_block(config: EngineConfig) -> bool:
    """Whether no sequence is longer than one block of the cache: prefixes are reused in whole blocks, so looking them up is useless."""
    return config.max_model_len <= int(config.extra_args.get("block_size") or CPU_BLOCK_TOKENS)


def _adapter_args(config: EngineConfig) -> dict[str, Any]:
    """What makes room for adapters.

    Layers are named also where all have adapters: vLLM would adapt the head too, whose CPU kernel cannot compute log-probs of prompts.
    """
    adapters = config.adapters
    if adapters is None:
        return {}
    named = adapters.target_modules or linear_layers(expected_parameters(config.model_path, config.trust_remote_code))
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapters.slot_rank, "lora_target_modules": list(named)}
