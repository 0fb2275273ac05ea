"""vLLM's own OpenAI-compatible server as a worker: the model of a judge, or a reward model, on devices of the job.

The server is a process of its own (``server_child.py`` ends it with this worker); whoever has its key may ask it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rljob_runtime.errors import ModelError, StartupDeadlineError

KEY_VARIABLE = "VLLM_API_KEY"
"""Read by vLLM's server; a key among its arguments would be shown to every user of the node."""
_CHILD = "rljob_runtime.engine.server_child"
_SERVER = "vllm.entrypoints.openai.api_server"
_POLL_S = 0.2
_END_S = 20.0
_SHOWN_CHARACTERS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One engine of a component that serves."""

    name: str
    """Of the component; what the model is called in requests."""
    model_path: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    """None: a share of the accelerator's memory."""
    memory_fraction: float = 0.8
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: int = 0
    classifies: bool = False
    """Whether it serves a classification model at ``/classify`` instead of completions."""
    extra_args: Mapping[str, object] = field(default_factory=dict)
    """By vLLM's own names, with underscores."""
    log_file: Path

    def arguments(self, host: str, port: int) -> list[str]:
        """Command line of the server."""
        given: dict[str, object] = {
            "model": self.model_path,
            "served_model_name": self.name,
            "host": host,
            "port": port,
            "revision": self.revision,
            "trust_remote_code": self.trust_remote_code or None,
            "dtype": self.dtype,
            "tensor_parallel_size": self.tensor_parallel_size,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "gpu_memory_utilization": None if self.kv_cache_bytes is not None else self.memory_fraction,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enforce_eager": self.enforce_eager or None,
            "seed": self.seed,
            **({"runner": "pooling", "convert": "classify"} if self.classifies else {}),
            **self.extra_args,
        }
        return [word for name, value in given.items() if value is not None for word in _option(name.replace("_", "-"), value)]


class VllmServer:
    """One engine behind HTTP."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing starts before :meth:`serve`."""
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._served: tuple[str, str] | None = None

    def serve(self, host: str, port: int, key: str, timeout_s: float) -> None:
        """Start the server and wait until it answers.

        Raises:
            ModelError: it ended; with the end of its log.
            StartupDeadlineError: it did not answer within ``timeout_s``.
        """
        command = [sys.executable, "-m", _CHILD, sys.executable, "-m", _SERVER, *self._config.arguments(host, port)]
        with self._config.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=os.environ | {KEY_VARIABLE: key}, start_new_session=True
            )
        self._wait_until_healthy(f"http://{host}:{port}/health", time.monotonic() + timeout_s, timeout_s)
        self._served = (f"http://{host}:{port}/v1", key)

    def served(self) -> tuple[str, str]:
        """Base URL and key, after :meth:`serve`."""
        if self._served is None:
            raise RuntimeError(f"{self._config.name}: served was called before serve")
        return self._served

    def close(self) -> None:
        """End the server; may be called twice."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # the child ends the server's processes and then itself
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _wait_until_healthy(self, url: str, deadline_s: float, timeout_s: float) -> None:
        config, process = self._config, self._process
        assert process is not None
        while process.poll() is None:
            if _is_healthy(url):
                return
            if time.monotonic() > deadline_s:
                self.close()
                raise StartupDeadlineError(f"{config.name}: vLLM's server did not answer within {timeout_s:g} s; log: {config.log_file}")
            time.sleep(_POLL_S)
        said = config.log_file.read_text(errors="replace")[-_SHOWN_CHARACTERS:]
        ended = f"vLLM's server for {config.model_path} ended with exit code {process.returncode}"
        raise ModelError(f"{config.name}: {ended}; log: {config.log_file}\n{said}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5.0) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _option(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
