"""SGLang's server as a process of one engine: started in SGLang's own interpreter, ended with the worker.

It listens on the loopback interface only: whoever reaches its port may change its weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from rljob_runtime.cluster.ports import group_port
from rljob_runtime.errors import DeadlineError, EngineDiedError, ModelError

HOST = "127.0.0.1"
CPU_KERNELS = Path(__file__).with_name("cpu_kernels")
"""Put on the server's path where CPU cores compute; see the package in it."""
NO_LIBRARY = "/nonexistent/libnccl.so"
"""SGLang does without NCCL where it cannot be loaded."""
SERVER = ("-m", "sglang.launch_server")
"""What its interpreter runs; options follow."""
_CHILD = "rljob_runtime.engine.server_child"
_NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
_POLL_S = 0.3
_HEALTH_TIMEOUT_S = 30.0
_END_S = 20.0
_KEPT_LINES = 40


def server_environment(threads: int | None, ledger: Path | None = None, ranks: int = 1) -> dict[str, str]:
    """Variables of the server; with ``threads`` in each of its ranks CPU cores compute, and ``ledger`` says what one holds."""
    variables = {
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": f"{HOST},localhost",
        # The limit is RLJob's own; it is the model's where that is shorter, and then SGLang refuses to add its reserve to it.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if threads is not None:
        variables |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(CPU_KERNELS)}
        # Ranks find NCCL in torch's packages and open a CUDA device with it; without the library they use gloo. SGLang refuses more ranks
        # than NUMA nodes unless their cores are named; nothing is bound to them without its compiled kernels.
        variables |= {"SGLANG_NCCL_SO_PATH": NO_LIBRARY, "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    if ledger is not None:
        variables["RLJOB_MEMORY_LEDGER"] = str(ledger)
    return variables


class SglangServer:
    """One running server."""

    def __init__(self, python: Path, arguments: Sequence[str], environment: Mapping[str, str], on_end: Callable[[str], None]) -> None:
        """Start it; :meth:`wait_until_healthy` waits.

        Args:
            python: interpreter that has SGLang.
            arguments: of ``sglang.launch_server``, without host and port.
            environment: over this process's own.
            on_end: called once, from a thread of its own, with what became of it.
        """
        port = group_port(HOST)
        self.url = f"http://{HOST}:{port}"
        self._on_end = on_end
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        unset = [word for name in _NOT_INHERITED for word in ("-u", name)]
        settings = [f"{name}={value}" for name, value in environment.items()]
        server = [str(python), *SERVER, *arguments, "--host", HOST, "--port", str(port)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, "env", *unset, *settings, *server],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, name="rljob-sglang-log", daemon=True).start()

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Wait until it has answered a request.

        Raises:
            ModelError: it ended; with the end of its log.
            DeadlineError: not within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if _is_healthy(f"{self.url}/health"):
                return
            if time.monotonic() > deadline:
                self.close()
                raise DeadlineError(f"SGLang's server was not ready after {timeout_s:.0f} s; raise start_timeout_s. {self._said()}")
            time.sleep(_POLL_S)
        raise ModelError(f"SGLang's server ended with exit code {self._process.returncode} while it started. {self._said()}")

    def info(self) -> Mapping[str, Any]:
        """What it says of itself.

        Raises:
            EngineDiedError: it does not answer.
        """
        try:
            with _opener().open(f"{self.url}/server_info", timeout=_HEALTH_TIMEOUT_S) as answer:
                found: Mapping[str, Any] = json.load(answer)
        except OSError as exc:
            raise EngineDiedError(f"SGLang's server did not say what it holds: {exc}; start a new engine") from exc
        return found

    def resident_bytes(self) -> int:
        """Memory of its processes."""
        try:
            return sum(process.memory_info().rss for process in family(self._process.pid))
        except psutil.NoSuchProcess:
            return 0

    def pids(self) -> list[int]:
        """Its processes, the one that watches over them first."""
        return [process.pid for process in family(self._process.pid)]

    def close(self) -> None:
        """End it with all its processes; may be called twice."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()  # the child ends the server's processes and then itself
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _follow(self) -> None:
        """Pass on what it prints, keep the last lines, and report its end."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            sys.stderr.write(f"sglang: {text}\n")  # the worker's log
        self._on_end(f"SGLang's server ended with exit code {self._process.wait()}; start a new engine. {self._said()}")

    def _said(self) -> str:
        return "The end of its log:\n" + "\n".join(self._lines)


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; raises psutil.NoSuchProcess."""
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def _opener() -> urllib.request.OpenerDirector:
    """Without the environment's proxies."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _is_healthy(url: str) -> bool:
    try:
        with _opener().open(url, timeout=_HEALTH_TIMEOUT_S) as answer:
            return int(answer.status) == 200
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
