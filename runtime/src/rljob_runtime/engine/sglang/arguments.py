"""Arguments of SGLang's server: from the settings of an engine to its command line, and what its own parser says of ``extraArgs``."""

from __future__ import annotations

import difflib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_api.errors import FieldError, field_error
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.sglang.interpreter import sglang_python
from rljob_runtime.errors import ModelError, SetupError

CHILD_TIMEOUT_S = 300.0
"""Importing SGLang takes seconds, on a busy machine with a cold disk minutes."""
_CHILD = Path(__file__).with_name("arguments_child.py")
RESERVE_TOKENS = 6
"""Of a context SGLang keeps these to itself: prompts have fewer than ``context_length - 6`` tokens, prompt and response together at most
``context_length - 2`` (``max_req_input_len`` and ``max_req_len`` of its ``tp_worker.py`` and ``scheduler.py``)."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def server_arguments(config: EngineConfig, model_config: Any) -> dict[str, Any]:
    """Arguments by SGLang's names; those of ``config.extra_args`` go over them.

    Scheduling ahead (overlap) is off because spans of weight versions are off by one with it. The sampling mask may have every token, so
    that it is there for any top-p, and the log-probs with it. The server chooses its random seed: two engines with one would sample alike.
    A scheduler with nothing to do waits for a message; by default it would keep one core busy.

    Args:
        config: how to start; with ``threads`` CPU cores compute.
        model_config: of transformers, for text.

    Raises:
        ModelError: the cache that was asked for does not hold one request.
    """
    on_cpu = config.threads is not None
    own: dict[str, Any] = {
        "model_path": config.model_path,
        "skip_tokenizer_init": True,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "context_length": config.max_model_len + RESERVE_TOKENS,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tensor_parallel_size,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager,
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,
        "incremental_streaming_output": True,
        "sampling_backend": "pytorch",
        "sampling_mask_max_tokens": int(model_config.vocab_size),
        "weight_version": "0",
        "log_level": "warning",
        "enable_memory_saver": config.release != "never",
        "enable_weights_cpu_backup": config.release == "copy",
    }
    if config.kv_cache_bytes is not None:
        own["max_total_tokens"] = _cache_tokens(config, model_config)
    else:
        own["mem_fraction_static"] = config.gpu_memory_utilization
    if config.max_batched_tokens is not None:
        own["chunked_prefill_size"] = config.max_batched_tokens
    if on_cpu:
        own |= {"device": "cpu", "attention_backend": "torch_native"}
    return own | dict(config.extra_args)


def _cache_tokens(config: EngineConfig, model_config: Any) -> int:
    """Tokens whose keys and values fit ``kv_cache_bytes`` of one device."""
    token_bytes = int(model_config.num_hidden_layers) * _cached_numbers(config, model_config) * _DTYPE_BYTES[config.dtype]
    tokens, least = int(config.kv_cache_bytes or 0) // token_bytes, config.max_model_len + RESERVE_TOKENS
    if tokens < least:
        raise ModelError(
            f"engine.kvCacheBytes {config.kv_cache_bytes} holds {tokens} tokens of this model, one request may have "
            f"{config.max_model_len}; write at least {token_bytes * least}"
        )
    return tokens


def _cached_numbers(config: EngineConfig, model_config: Any) -> int:
    """Of a token in one layer on one device: heads are divided, but not shared by devices (``get_num_kv_heads`` of SGLang)."""
    latent = getattr(model_config, "kv_lora_rank", None)
    if latent is not None:
        return int(latent) + int(model_config.qk_rope_head_dim)
    heads = int(model_config.num_attention_heads)
    key_heads = int(getattr(model_config, "num_key_value_heads", None) or heads)
    head_size = int(getattr(model_config, "head_dim", None) or model_config.hidden_size // heads)
    return 2 * max(1, key_heads // config.tensor_parallel_size) * head_size


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as SGLang's command line has them; None and switches that are off are left out."""
    return [word for name, value in arguments.items() for word in _words(f"--{name.replace('_', '-')}", value)]


def _words(option: str, value: Any) -> list[str]:
    match value:
        case None | False:
            return []
        case True:
            return [option]
        case list():
            return [option, *(entry if isinstance(entry, str) else json.dumps(entry) for entry in value)]
        case dict():
            return [option, json.dumps(value)]
        case _:
            return [option, str(value)]


def problems_in_child(path: str, arguments: Mapping[str, Any]) -> Sequence[FieldError]:
    """What SGLang's own parser refuses, asked of it in its own interpreter.

    None where it is not there or does not answer in time: the server's start reports them then.
    """
    asked = [
        {"name": name, "words": _words(f"--{name.replace('_', '-')}", value), "off": value is False} for name, value in arguments.items()
    ]
    question = json.dumps(asked)
    try:
        command = [str(sglang_python()), str(_CHILD)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, input=question, env=environment, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=True)
    except (SetupError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ()
    answer = json.loads(done.stdout.splitlines()[-1])
    return tuple(_problem(f"{path}.{name}", arguments[name], said, answer["known"]) for name, said in answer["problems"].items())


def _problem(path: str, value: Any, said: str | None, known: Sequence[str]) -> FieldError:
    """One problem: what the parser said, or None for a name that it does not have."""
    if said is not None:
        return field_error(path, value, f"is refused by SGLang: {said}", "write a value that it takes")
    near = difflib.get_close_matches(path.rsplit(".", 1)[1].replace("-", "_"), known, n=1)
    return field_error(path, value, "is not an argument of SGLang", f"did you mean {near[0]}?" if near else "remove it")
