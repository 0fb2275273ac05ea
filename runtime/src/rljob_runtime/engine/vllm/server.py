"""vLLM's own OpenAI-compatible server as a worker: the model of a judge, or a reward model, on devices of the job.

The server is a process of its own (``server_child.py`` ends it with this worker); whoever has its key may ask it. Where it shares devices
it gives its memory back as a whole, weights and cache: by vLLM's sleep (level 1: weights in host memory), on CPU by :mod:`.server_memory`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rljob_runtime.addresses import host_and_port
from rljob_runtime.cluster.ports import take_listener
from rljob_runtime.engine.vllm import model_infos
from rljob_runtime.errors import ModelError, OffloadError, StartupDeadlineError
from rljob_runtime.offload.states import MemorySnapshot, StateKind, SwitchReport

_CONTROL_VARIABLE = "VLLM_SERVER_DEV_MODE"
"""Makes vLLM's server take calls that move its memory; the guard asks for the key there, too."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Read by vLLM's server; a key among its arguments would be shown to every user of the node."""
_CHILD = "rljob_runtime.engine.server_child"
SERVER = ("-m", "rljob_runtime.engine.vllm.serve")
"""What the interpreter runs; options follow."""
_POLL_S = 0.2
_END_S = 20.0
_SHOWN_CHARACTERS = 2000
_MOVE_TIMEOUT_S = 600.0
"""Of one call that moves memory; whoever asks for it has an earlier deadline."""
_GUARD = "rljob_runtime.engine.vllm.server_guard.Guard"
_EXTENSION = "rljob_runtime.engine.vllm.server_memory.MovableMemory"


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
    pipeline_parallel_size: int = 1
    max_num_seqs: int = 256
    kv_cache_bytes: int | None = None
    """None: a share of the accelerator's memory."""
    memory_fraction: float = 0.8
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    seed: int = 0
    classifies: bool = False
    """Whether it serves a classification model at ``/classify`` instead of completions."""
    releases: bool = False
    """Whether it gives its memory back when asked to."""
    on_cpu: bool = False
    """Whether CPU cores compute."""
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
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "gpu_memory_utilization": None if self.kv_cache_bytes is not None else self.memory_fraction,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enforce_eager": self.enforce_eager or None,
            "seed": self.seed,
            "middleware": _GUARD,
            **({"runner": "pooling", "convert": "classify"} if self.classifies else {}),
            **({"worker_extension_cls": _EXTENSION} if self.releases else {}),
            **({"enable_sleep_mode": True} if self.releases and not self.on_cpu else {}),
            **self.extra_args,
        }
        return [word for name, value in given.items() if value is not None for word in _option(name.replace("_", "-"), value)]


class VllmServer:
    """One engine behind HTTP; nothing is asked of it while its memory is away."""

    def __init__(self, config: ServerConfig) -> None:
        """Nothing starts before :meth:`serve`."""
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._served: tuple[str, str] | None = None
        self._url = ""
        self._is_away = False

    def serve(self, host: str, port: int, key: str, timeout_s: float) -> None:
        """Start the server and wait until it answers.

        Raises:
            ModelError: it ended; with the end of its log.
            StartupDeadlineError: it did not answer within ``timeout_s``.
        """
        model_infos.seed()
        command = [sys.executable, "-m", _CHILD, sys.executable, *SERVER, *self.config.arguments(host, port)]
        env = os.environ | {KEY_VARIABLE: key} | ({_CONTROL_VARIABLE: "1"} if self.config.releases else {})
        if (listener := take_listener(port)) is not None:  # this process has held the port since it was chosen
            listener.close()
        with self.config.log_file.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=env, start_new_session=True)
        self._url = f"http://{host_and_port(host, port)}"
        self._wait_until_healthy(f"{self._url}/health", time.monotonic() + timeout_s, timeout_s)
        self._served = (f"{self._url}/v1", key)

    def served(self) -> tuple[str, str]:
        """Base URL and key, after :meth:`serve`."""
        if self._served is None:
            raise RuntimeError(f"{self.config.name}: served was called before serve")
        return self._served

    def offload(self, kinds: Collection[StateKind]) -> SwitchReport:
        """Give weights and cache back, once what is being answered has ended.

        Raises:
            OffloadError: the server did not do it; it is of no use any more.
        """
        calls = ("/reset_prefix_cache", _rpc("rljob_release")) if self.config.on_cpu else ("/sleep?level=1&mode=wait",)
        return self._move("offload", calls if kinds and not self._is_away else (), is_away=bool(kinds) or self._is_away)

    def load(self, kinds: Collection[StateKind]) -> SwitchReport:
        """Take them again; errors as of :meth:`offload`."""
        calls = (_rpc("rljob_restore"),) if self.config.on_cpu else ("/wake_up",)
        return self._move("load", calls if kinds and self._is_away else (), is_away=self._is_away and not kinds)

    def _move(self, direction: str, calls: Collection[str | tuple[str, str]], *, is_away: bool) -> SwitchReport:
        before, begin = self._memory(), time.perf_counter()
        for call in calls:
            self._call(call)
        elapsed_s, after = time.perf_counter() - begin, self._memory()
        self._is_away = is_away
        freed = {StateKind.PARAMS: abs(before.allocated_bytes - after.allocated_bytes)} if calls else {}
        return SwitchReport(
            direction=direction,
            copied_bytes={} if self.config.on_cpu else _copied(freed, before, after),
            freed_bytes=freed,
            elapsed_s=elapsed_s,
            before=before,
            after=after,
        )

    def _memory(self) -> MemorySnapshot:
        """Memory of the server's workers, summed."""
        workers = self._call(_rpc("rljob_snapshot"))["results"]
        return MemorySnapshot(**{f.name: sum(int(worker[f.name]) for worker in workers) for f in fields(MemorySnapshot)})

    def _call(self, call: str | tuple[str, str]) -> Any:
        """One of the server's calls: a path, or ``/collective_rpc`` with a method of its workers."""
        path, method = call if isinstance(call, tuple) else (call, None)
        body = b"" if method is None else json.dumps({"method": method}).encode()
        _, key = self.served()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data=body, headers=headers, method="POST")
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_MOVE_TIMEOUT_S) as answer:
                text = answer.read()
        except OSError as error:  # also what is refused, and a connection that ends
            what = method or path
            raise OffloadError(f"{self.config.name}: vLLM's server did not answer {what}: {error}; log: {self.config.log_file}") from error
        return json.loads(text) if text else None

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
        config, process = self.config, self._process
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


def _rpc(method: str) -> tuple[str, str]:
    return "/collective_rpc", method


def _copied(freed: Mapping[StateKind, int], before: MemorySnapshot, after: MemorySnapshot) -> dict[StateKind, int]:
    """What traveled: the host's part of it; the cache is dropped."""
    return {kind: abs(before.pinned_bytes - after.pinned_bytes) for kind in freed}


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
