"""Passes each request for a fork to the preloaded process of its kind; starts those, ends with its standard input. See the package."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import messages
import preloaded

READ_AT_IMPORT = (
    "GLOO_", "GOMP_", "GRPC_", "HF_", "HUGGINGFACE_", "KMP_", "LD_", "MALLOC_", "MKL_", "NCCL_", "NUMEXPR_", "NUMPY_", "OMP_",
    "OPENBLAS_", "PYTHON", "PYTORCH_", "SAFETENSORS_", "SGLANG_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "USE_", "VLLM_",
    "XDG_",
)  # fmt: skip
"""Beginnings of names of variables that Python, torch, transformers, vLLM or what they import may read when it is imported."""
READ_LATER = {"PYTHONBREAKPOINT", "VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "SGLANG_CPU_OMP_THREADS_BIND"} | preloaded.READ_BY_NO_IMPORT
"""Of these, what is read when an engine or a server starts, or at a breakpoint."""
OF_TORCH = ("GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "TRITON_", "VLLM_")
"""Of these, what no process reads that imports neither torch nor vLLM."""
OF_THREADS = ("GOMP_", "KMP_")
"""Of these, what says how OpenMP's threads wait; where there is one, it does not."""
LEFT_BY_VLLM = {
    "LD_LIBRARY_PATH", "LD_PRELOAD", "NUMEXPR_MAX_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS", "TRITON_CACHE_AUTOTUNING", "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME", "VLLM_WORKER_MULTIPROC_METHOD",
}  # fmt: skip
"""What the import of vLLM leaves in the environment of a test: no driver of a user has it, and a fork that imports vLLM sets it."""
OWN = {"OPENBLAS_NUM_THREADS": "1"}
"""Of preloaded processes: numpy's threads would be started by its import, and no fork has them."""
IMPORT_PATH = "PYTHONPATH"
"""Is set up by each fork for itself."""
FROM_REQUEST = 2
"""Which worker of a kind and environment is the first one that is forked: what comes once is not worth a process."""
MAX_PRELOADED = 18
"""Half a gigabyte each at most, but one for those of servers; test lanes ask for some 10, and what is refused starts as users' do."""

Key = tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]
"""Interpreter, modules, environment."""


@dataclass
class Manager:
    """The preloaded processes."""

    listening: socket.socket
    preloaded: dict[Key, socket.socket] = field(default_factory=dict)
    ended: set[Key] = field(default_factory=set)
    """Could not be started, or died: never again."""
    seen: Counter[Key] = field(default_factory=Counter)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def serve(self) -> None:
        """Until the standard input is closed."""
        while True:
            ready, _, _ = select.select([0, self.listening, *self.preloaded.values()], [], [])
            if 0 in ready:
                return
            for key, end in list(self.preloaded.items()):
                if end in ready:  # they send nothing: it has ended
                    del self.preloaded[key]
                    self.ended.add(key)
                    end.close()
            if self.listening in ready:
                launcher, _ = self.listening.accept()
                with launcher:
                    launcher.settimeout(10.0)
                    with contextlib.suppress(OSError):
                        self._pass_on(launcher)

    def _pass_on(self, launcher: socket.socket) -> None:
        """A launcher that is not passed on sees its connection closed, and becomes the worker itself."""
        request, files = messages.receive(launcher)
        try:
            to = self._chosen(request) if request else None
            if to is not None:
                messages.send(to, request, [launcher.fileno(), *files])
        finally:
            for file in files:
                os.close(file)

    def _chosen(self, request: dict[str, Any]) -> socket.socket | None:
        worker, interpreter = request["worker"], request["interpreter"]
        modules = tuple(worker["modules"])
        read = worker.setdefault("read", _read_at_import(request))  # a process that is spawned imports what its parent did
        key = (interpreter, modules, tuple(sorted(read.items())))
        self.seen[key] += 1
        there = self.preloaded.get(key)
        enough = self.seen[key] >= worker.get("from_request", FROM_REQUEST)
        if there is not None or key in self.ended or not enough or len(self.preloaded) == MAX_PRELOADED:
            return there
        self.preloaded[key] = self._start(interpreter, modules, read)
        return self.preloaded[key]

    def _start(self, interpreter: str, modules: tuple[str, ...], read: dict[str, str]) -> socket.socket:
        print(f"preloads {modules[0]} with {read}", flush=True)
        inherited = {IMPORT_PATH} if interpreter == sys.executable else set()
        kept = {n: v for n, v in os.environ.items() if n in inherited or not n.startswith(READ_AT_IMPORT)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [interpreter, str(Path(__file__).with_name("preloaded.py")), str(theirs.fileno()), *modules]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=kept | OWN | read))
        return ours


def _read_at_import(request: dict[str, Any]) -> dict[str, str]:
    """Variables of the process that is asked for; another interpreter's import path is that of all of its processes."""
    worker, environment = request["worker"], request["environment"] | request["worker"]["environment"]
    of_forks = {IMPORT_PATH} if request["interpreter"] == sys.executable else set()
    threads = environment.get("OMP_NUM_THREADS")
    as_without = {("PYTHONDONTWRITEBYTECODE", ""), ("MKL_NUM_THREADS", threads)}  # MKL takes OpenMP's number where it has none
    unread = (OF_TORCH if worker.get("without_torch") else ()) + (OF_THREADS if threads == "1" else ())
    read = {n: v for n, v in environment.items() if n.startswith(READ_AT_IMPORT) and n not in READ_LATER | LEFT_BY_VLLM | of_forks}
    return {n: v for n, v in read.items() if not n.startswith(unread) and (n, v) not in as_without}


def main() -> None:
    """``manager.py SOCKET``: says ``ready`` on its standard output when it listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(sys.argv[1])
        listening.listen(64)
        os.write(1, b"ready\n")
        os.dup2(2, 1)
        manager = Manager(listening)
        manager.serve()
    for end in manager.preloaded.values():
        end.close()
    for process in manager.processes:
        process.wait()


if __name__ == "__main__":
    main()
